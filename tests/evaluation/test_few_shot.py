import json

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.evaluation import extract_features, few_shot, linear_probe
from keras_moe.evaluation.few_shot import (
    _decompose,
    _standardise,
    best_l2,
    few_shot_accuracies,
    sample_shots,
)
from tests import golden


def clusters(examples=60, num_classes=3, dim=4, spread=0.1, seed=0):
    """Features that gather around one centre per class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(examples) % num_classes
    centres = np.random.default_rng(99).normal(size=(num_classes, dim))
    features = centres[labels] + spread * rng.normal(size=(examples, dim))
    return features, labels


def ridge_regression(features, labels, test_features, num_classes, l2):
    """The weights (F + 1, C), and the scores of the test features."""
    mean, std, left, eigs, right = _decompose(features, labels, num_classes)
    weights = left @ (right / (eigs + l2))
    return weights, _standardise(test_features, mean, std) @ weights


@pytest.mark.parametrize("case", ["n_gt_d", "n_lt_d"])
def test_ridge_matches_the_reference(case):
    arrays, config = golden.load(f"13_fewshot/{case}")
    train = arrays["inputs/x_train"], arrays["inputs/y_train"]
    test = arrays["inputs/x_test"], arrays["inputs/y_test"]
    l2s = arrays["inputs/l2_regs"]

    for i, l2 in enumerate(l2s):
        weights, scores = ridge_regression(*train, test[0], config["num_classes"], l2)
        expected = arrays["outputs/weights_float64"][i]
        np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-9)
        expected = arrays["outputs/scores_float64"][i]
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-8)
    accuracies = few_shot_accuracies(*train, *test, config["num_classes"], l2s)
    np.testing.assert_array_equal(accuracies, arrays["outputs/accuracy_float64"])


@pytest.mark.parametrize(("examples", "dim"), [(90, 12), (9, 12), (90, 1)])
@pytest.mark.parametrize("spread", [1e-9, 1.0, 1e4])
def test_many_penalties_are_those_of_each(examples, dim, spread):
    train = clusters(examples, num_classes=9, dim=dim, spread=spread)
    test = clusters(200, num_classes=9, dim=dim, spread=2 * spread, seed=1)
    l2s = 2.0 ** np.random.default_rng(0).permutation(np.arange(-10, 30))
    actual = few_shot_accuracies(*train, *test, 9, l2s)
    for l2, accuracy in zip(l2s, actual):
        _, scores = ridge_regression(*train, test[0], 9, l2)
        assert (scores.argmax(axis=-1) == test[1]).mean() == accuracy
        assert few_shot_accuracies(*train, *test, 9, [l2]) == accuracy


def test_best_l2_matches_the_reference_and_resolves_ties():
    arrays, config = golden.load("13_fewshot/best_l2_selection")
    chosen = best_l2(arrays["inputs/accuracy"], config["l2"])
    np.testing.assert_array_equal(chosen, arrays["outputs/best_l2"])
    # Equal accuracies: the earlier l2 ranks higher.
    np.testing.assert_array_equal(best_l2([[[0.1, 0.5, 0.5]]], [1, 2, 4]), [2])
    # Ranks (0, 1, 2) and (2, 1, 0) have equal means: the first wins.
    ranked = [[[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]]]
    np.testing.assert_array_equal(best_l2(ranked, [1, 2, 4]), [1])


def test_a_linear_probe_chooses_its_penalty_without_the_test_set():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200)
    features = np.eye(3)[labels] @ rng.normal(size=(3, 20)) + rng.normal(size=(200, 20))
    train, test = (features[:150], labels[:150]), (features[150:], labels[150:])
    accuracy = linear_probe(*train, *test)
    # Bayes' rule for these classes is right more often than 0.9.
    assert accuracy > 0.9
    l2s = [1e-3, 10.0, 1e12]
    assert linear_probe(*train, *test, l2s=l2s) in few_shot_accuracies(
        *train, *test, 3, l2s[:2]
    )
    # Other test labels do not change the classifier.
    wrong = linear_probe(*train, test[0], (test[1] + 1) % 3)
    assert wrong <= 1 - accuracy
    with pytest.raises(ValueError, match="2 training examples; received: 1"):
        linear_probe(features[:1], labels[:1], *test)


@given(
    examples=st.integers(4, 12), dim=st.integers(1, 12), num_classes=st.integers(2, 4),
    l2=st.floats(1e-2, 1e3), seed=st.integers(0, 2**16),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_weights_solve_the_normal_equations(examples, dim, num_classes, l2, seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(examples, dim))
    labels = rng.integers(num_classes, size=examples)
    weights, _ = ridge_regression(features, labels, features, num_classes, l2)
    x = (features - features.mean(0)) / (features.std(0) + 1e-5)
    x = np.concatenate([x, np.full((examples, 1), 100.0)], axis=1)
    y = 2 * np.eye(num_classes)[labels] - 1
    gradient = x.T @ (x @ weights - y) + l2 * weights
    np.testing.assert_allclose(gradient, 0, atol=1e-6 * examples)


@given(
    counts=st.lists(st.integers(3, 9), min_size=1, max_size=5),
    shots=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_draws_are_balanced_distinct_nested_and_repeatable(counts, shots, seed):
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(counts)), counts)
    )
    drawn = sample_shots(labels, shots, len(counts), seed)
    assert len(set(drawn.tolist())) == len(drawn)
    np.testing.assert_array_equal(labels[drawn], np.repeat(range(len(counts)), shots))
    np.testing.assert_array_equal(drawn, sample_shots(labels, shots, len(counts), seed))
    assert set(drawn) <= set(sample_shots(labels, 3, len(counts), seed))
    halves = np.arange(100) % 2
    assert set(sample_shots(halves, 5, 2, 0)) != set(sample_shots(halves, 5, 2, 1))


def test_few_shot_sweeps_shots_seeds_and_penalties():
    train, test = clusters(spread=0.6), clusters(seed=1, spread=0.6)
    result = few_shot(*train, *test, shots=(1, 10), l2s=(0.1, 10.0), seeds=(0, 1, 5))
    assert result.accuracies.shape == (2, 3, 2)
    drawn = sample_shots(train[1], 10, 3, seed=5)
    few = train[0][drawn], train[1][drawn]
    expected = few_shot_accuracies(*few, *test, 3, l2s=(0.1, 10.0))
    np.testing.assert_array_equal(result.accuracies[1, 2], expected)
    best = [result.l2s.index(l2) for l2 in result.best_l2]
    at_best = np.stack([result.accuracies[i, :, b] for i, b in enumerate(best)])
    np.testing.assert_allclose(result.mean, at_best.mean(axis=1))
    np.testing.assert_allclose(result.std, at_best.std(axis=1, ddof=1))
    assert result.mean[1] > result.mean[0]
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["shots"] == [1, 10]
    np.testing.assert_array_equal(stored["accuracies"], result.accuracies)


def images_of_clusters(**kwargs):
    features, labels = clusters(**kwargs)
    return features.reshape(-1, 2, 2, 1).astype("float32"), labels.astype("int32")


def flattening_model():
    return keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten()])


@pytest.mark.parametrize("kind", ["model", "layer", "numpy function"])
def test_features_of_a_model(kind):
    model = {
        "model": flattening_model,
        "layer": keras.layers.Flatten,
        "numpy function": lambda: lambda images: images.reshape(len(images), -1),
    }[kind]()
    train, test = images_of_clusters(spread=0.5), images_of_clusters(seed=1)
    # 60 images in batches of 25: the last one is partial.
    features = (extract_features(model, x, 25, verbose=0) for x in (train, test))
    actual = few_shot(*(x for pair in features for x in pair), (1, 5))
    expected = few_shot(
        train[0].reshape(60, 4), train[1], test[0].reshape(60, 4), test[1], (1, 5)
    )
    np.testing.assert_allclose(actual.accuracies, expected.accuracies, atol=1e-12)


def batches_of(data, kind):
    if kind == "tf.data":
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensor_slices(data).batch(16)
    if kind == "generator":
        return ((data[0][i : i + 16], data[1][i : i + 16]) for i in range(0, 60, 16))
    if kind == "list":
        return list(batches_of(data, "generator"))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return data[0][16 * i : 16 * i + 16], data[1][16 * i : 16 * i + 16]

    return Batches()


@pytest.mark.parametrize("kind", ["tf.data", "generator", "list", "PyDataset"])
def test_batched_data_gives_the_same_result(kind, capsys):
    train = images_of_clusters(spread=0.5)
    model = flattening_model()
    expected = extract_features(model, train, verbose=0)
    assert not capsys.readouterr().out
    actual = extract_features(model, batches_of(train, kind))
    # A generator does not say how many batches it has.
    assert ("4/Unknown" if kind == "generator" else "4/4") in capsys.readouterr().out
    for mine, own in zip(actual, expected):
        np.testing.assert_array_equal(mine, own)
