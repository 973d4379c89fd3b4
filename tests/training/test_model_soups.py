"""Greedy soups, and the branches whose checkpoints they mix."""

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.models import from_preset
from tests.compare import to_numpy
from tests.training.runs import LONG_RUN, short_recipe


def point_model():
    """A model that is a point of a plane, a seed and a counter."""
    dropout = keras.layers.Dropout(0.5, seed=1)
    dense = keras.layers.Dense(1, use_bias=False, name="dense")
    return keras.Sequential([keras.Input((2,)), dropout, dense])


def array(x, y):
    return [np.array([[x], [y]], "float32")]


def closeness(target):
    def metric(model):
        point = to_numpy(model.get_layer("dense").kernel)[:, 0]
        return -float(np.square(point - target).sum())

    return metric


def test_the_best_of_all_mixtures():
    # Twice the first and once the second is the target: no other mixture of three is
    # as good, and the greedy search finds it, and nothing better after it.
    points, target = [array(0, 0), array(3, 0), array(0, 9)], (1.0, 0.0)
    model = point_model()
    soup = training.greedy_soup(model, points, closeness(target))
    assert soup.ingredients == (0, 1, 0)
    assert soup.scores == pytest.approx((-1.0, -0.25, 0.0), abs=1e-12)
    assert soup.single_scores == pytest.approx((-1.0, -4.0, -82.0))
    # And the model is that soup.
    assert closeness(target)(model) == pytest.approx(0.0, abs=1e-12)
    # Without replacement there is no third.
    once = training.greedy_soup(model, points, closeness(target), replacement=False)
    assert once.ingredients == (0, 1)
    assert once.scores == pytest.approx((-1.0, -0.25))
    short = training.greedy_soup(model, points, closeness(target), max_ingredients=2)
    assert short.ingredients == (0, 1)


def test_files_of_every_kind(tmp_path, op_by_op):
    """Each alone is the checkpoint; and what is no float is not averaged."""
    settings = {"num_layers": 2, "hidden_dim": 8, "mlp_dim": 8, "num_heads": 2}

    def classifier():
        return from_preset("vmoe_digits", num_classes=3, **settings, load_weights=False)

    model = classifier()
    paths = [tmp_path / "a.weights.h5", tmp_path / "b.keras", tmp_path / "preset"]
    values = []
    for factor, path in enumerate(paths, 1):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, factor))
        values.append(model.get_weights())
        if path.suffix == ".h5":
            model.save_weights(path)
        elif path.suffix == ".keras":
            model.save(path)
        else:
            model.save_to_preset(path)
    checkpoints = [*paths, values[0]]
    other = classifier()

    def mean(model):
        return float(to_numpy(model.output_dense.kernel).mean())

    for position, factor in ((2, 3.0), (3, 1.0)):
        soup = training.greedy_soup(other, [checkpoints[position]], mean)
        assert soup == training.Soup((0,), (factor,), (factor,))
        for weight in other.weights:
            np.testing.assert_array_equal(to_numpy(weight), factor)
    # The metric wants 1.6: the second and the first.
    seeds = [x for x in other.variables if "seed" in x.path]
    own = [to_numpy(seed).tolist() for seed in seeds]
    soup = training.greedy_soup(
        other, checkpoints[:2], lambda model: -abs(mean(model) - 1.6), max_ingredients=2
    )
    assert soup.ingredients == (1, 0)
    for weight in other.weights:
        np.testing.assert_array_equal(to_numpy(weight), 1.5)
    assert seeds
    for seed, value in zip(seeds, own, strict=True):
        assert to_numpy(seed).tolist() == value


def test_an_error_leaves_the_model_as_it_was(tmp_path):
    model = point_model()
    before = model.get_weights()
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    wide.save_weights(tmp_path / "wide.weights.h5")
    (tmp_path / "torn.weights.h5").write_bytes(b"none")
    good = array(1, 1)
    for checkpoints, metric, message in (
        ([], closeness((0, 0)), "at least one checkpoint"),
        ([good, array(1, 1) * 2], closeness((0, 0)), "checkpoint 1: zip"),
        ([good, tmp_path / "wide.weights.h5"], closeness((0, 0)), "checkpoint 1: "),
        ([good, tmp_path / "torn.weights.h5"], closeness((0, 0)), "torn.weights.h5"),
        ([good], lambda model: float("nan"), "finite metric; received: nan with"),
    ):
        with pytest.raises(ValueError, match=f"Expected .*{message}"):
            training.greedy_soup(model, checkpoints, metric)
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.quantize("int8")
    with pytest.raises(ValueError, match="kernel of int8"):
        training.greedy_soup(model, [model.get_weights()], lambda model: 0.0)


# Branches


def test_branches_of_a_run():
    run = short_recipe(name="run", **LONG_RUN)
    branch = training.cooldown_branch(run, 600, 80, data={"source": "folder:other"})
    assert (branch.name, branch.total_steps(10)) == ("run_cooldown_600_80", 680)
    assert (branch.data.source, branch.model) == ("folder:other", run.model)
    mine, theirs = branch.learning_rate(10), run.learning_rate(10)
    for step in range(0, 601, 30):
        assert float(mine(step)) == float(theirs(step))
    assert float(mine(640)) == pytest.approx(float(theirs(600)) / 2)
    assert float(mine(680)) == 0.0
    epochs = run.replace(schedule={"epochs": 3, "decay": "constant"})
    assert training.cooldown_branch(epochs, 500, 10).schedule.epochs is None


def test_checkpoints_of_a_run_make_a_soup(tmp_path):
    model = point_model()
    for step, point in enumerate(((1, 1), (3, 3))):
        model.get_layer("dense").kernel.assign(array(*point)[0])
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        training.save_checkpoint(tmp_path, step, {"model": variables}, {})
    actual = training.greedy_soup(
        model, training.checkpoints.list_checkpoints(tmp_path), closeness((2, 2))
    )
    assert sorted(actual.ingredients) == [0, 1]
    np.testing.assert_allclose(to_numpy(model.get_layer("dense").kernel), 2.0)
