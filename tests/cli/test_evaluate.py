"""`keras-moe evaluate`: figures of presets on digits and on images in folders."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from keras_moe import data, evaluation, models
from keras_moe.cli._inputs import find_examples
from keras_moe.cli.main import make_parser
from tests.pipelines import save

pytest.importorskip("tensorflow")

SMALL = {
    "patch_size": 8, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 16,
    "moe_layers": [1], "num_experts": 2,
}  # fmt: skip
SHAPE = (16, 16, 1)
CLASSES = ("bright", "dark", "round")


def small(**arguments):
    """The digits' model at sizes that take seconds, without weights."""
    return models.from_preset("vmoe_digits", load_weights=False, **SMALL | arguments)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A classifier of digits, with a head of its own, and its folder."""
    keras.utils.set_random_seed(1)
    model = small(num_classes=10)
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(0).normal(size=kernel.shape))
    folder = tmp_path_factory.mktemp("run") / "preset"
    model.save_to_preset(folder)
    return model, folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Grey images of several labels, bright or dark and half of them round."""
    folder = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        labels = {}
        for number in range(8):
            bright, is_round = number % 2, number // 2 % 2
            save(folder / split / f"{number}.png", 150 * bright + 10 * number)
            shape = CLASSES[2:] if is_round else ()
            labels[f"{number}.png"] = [CLASSES[1 - bright], *shape]
        (folder / split / "labels.json").write_text(json.dumps(labels))
    return folder


def test_accuracy_and_few_shot(done, digits):
    model, folder = digits
    output = done(
        "evaluate", folder, "--data", "digits", "--json", "--batch-size", 100,
        "--metrics", "accuracy", "average_precision", "few_shot",
    )  # fmt: skip
    figures = json.loads(output)
    images, labels = data.load_digits("test", SHAPE)
    _, accuracy = model.evaluate(images, labels, verbose=0)
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert (figures["images"], figures["classes"]) == (450, 10)
    assert figures["backend"] == keras.backend.backend()
    scores = model.predict(images, verbose=0)
    expected = evaluation.average_precision(np.eye(10)[labels], scores)
    np.testing.assert_allclose(figures["average_precision"], expected, atol=1e-3)
    features = keras.Model(model.input, model.features)
    sets = (data.load_digits("train", SHAPE), (images, labels))
    pool, test = (evaluation.extract_features(features, x, verbose=0) for x in sets)
    expected = evaluation.few_shot(*pool, *test, shots=(10,))
    few_shot = figures["few_shot"]["10_shot"]
    # One wrong image more or less.
    assert few_shot["mean"] == pytest.approx(expected.mean[0], abs=2 / 450)


def test_a_model_without_a_head(done, tmp_path):
    small(task="backbone").save_to_preset(tmp_path)
    arguments = ("evaluate", tmp_path, "--data", "digits")
    output = done(*arguments, "--shots", 1, 5, "--seeds", 0)
    assert "accuracy" in output
    assert "1-shot" in output
    assert "5-shot" in output
    assert "± 0.00%" in output


def test_several_labels(done, photos, tmp_path):
    keras.utils.set_random_seed(0)
    # In another order than the data's, and with a class more.
    names = ("round", "none", "dark", "bright")
    model = small(num_classes=4, multi_label=True)
    model.preprocessor = dataclasses.replace(
        models.ImagePreprocessor(SHAPE), class_names=names
    )
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(0).normal(size=kernel.shape))
    model.save_to_preset(tmp_path)
    output = done("evaluate", tmp_path, "--data", f"folder:{photos}", "--json")
    figures = json.loads(output)
    batches = data.load(
        f"folder:{photos}", "test", SHAPE, multi_label=True, one_hot=True
    )
    images, labels = (np.concatenate(x) for x in zip(*batches.as_numpy_iterator()))
    scores = model.predict(images, verbose=0)
    vectors = np.zeros((8, 4))
    for place, name in enumerate(sorted(CLASSES)):
        vectors[:, names.index(name)] = labels[:, place]
    expected = evaluation.average_precision(vectors, scores)
    assert figures["average_precision"][1] is None
    for value, other in zip(figures["average_precision"], expected):
        assert value is None or value == pytest.approx(other)
    assert figures["mean_average_precision"] == pytest.approx(np.nanmean(expected))
    assert figures["precision_at_1"] == evaluation.precision_at_1(vectors, scores)
    assert "few_shot" not in figures


def test_the_folder_of_a_run_names_its_images(program, digits):
    _, folder = digits
    results = folder.parent / "results.json"
    data_of_run = {"source": "digits", "train_split": "train", "test_split": "all"}
    recipe = {"data": data_of_run, "objective": {"name": "x"}}
    results.write_text(json.dumps({"recipe": recipe}))
    for preset in (folder.parent, folder):
        arguments = ("evaluate", preset, "--metrics", "accuracy", "--json")
        figures = json.loads(program(*arguments).output)
        facts = [figures[name] for name in ("data", "split", "images")]
        assert facts == ["digits", "all", 1797]
    figures = json.loads(program(*arguments, "--split", "test").output)
    assert figures["images"] == 450
    for text in ("{", '{"recipe": 3}', '{"recipe": {"preset": "vmoe_b16"}}'):
        results.write_text(text)
        errors = program("evaluate", folder.parent).errors
        expected = f"error: Expected the results of keras-moe train in {results}"
        assert errors.startswith(expected)
    results.unlink()


def evaluate_arguments(preset, *more):
    arguments = ["evaluate", str(preset), *map(str, more)]
    return make_parser().parse_args(arguments)


def test_the_images_are_those_of_the_run(photos, tmp_path):
    """Images that the run left out are left out again, of the split that it names."""
    exclude = tmp_path / "duplicates.json"
    source = f"folder:{photos}"
    data.write_exclusion(exclude, source, "train", 8, [0, 5])
    (photos / "test" / "3.png").rename(tmp_path / "whole.png")
    (photos / "test" / "3.png").write_bytes(b"no image")
    recipe = {"source": source, "exclude": str(exclude), "unreadable": "exclude"}
    recipe["max_labels"] = 3
    images = find_examples(evaluate_arguments("x"), recipe)

    def count(images, split):
        return sum(len(labels) for _, labels in images.images(split, SHAPE, 4))

    assert images.max_labels == 3
    with pytest.warns(UserWarning, match="1"):
        assert (count(images, "train"), count(images, "test")) == (6, 7)
    # Other images are read as they are.
    other = find_examples(evaluate_arguments("x", "--data", "digits"), recipe)
    assert (other.excluded, other.options, other.max_labels) == ({}, {}, None)
    (tmp_path / "whole.png").replace(photos / "test" / "3.png")


def test_classes_that_the_model_does_not_know(mistake, photos, tmp_path):
    model = small(num_classes=3)
    model.preprocessor = dataclasses.replace(
        models.ImagePreprocessor(SHAPE), class_names=("bright", "dark", "square")
    )
    model.save_to_preset(tmp_path)
    errors = mistake("evaluate", tmp_path, "--data", f"folder:{photos}")
    assert "3 classes of" in errors
    assert "(unknown: ['round'])" in errors


@pytest.fixture(scope="module")
def stingrays(tmp_path_factory):
    """Three images of a class and one of another, in folders as ImageNet-A's."""
    folder = tmp_path_factory.mktemp("imagenet_a")
    for wordnet_id, count in (("n01498041", 3), ("n01531178", 1)):
        for number in range(count):
            save(folder / "test" / wordnet_id / f"{number}.png", 0)
    return folder


def test_a_model_of_imagenet_chooses_among_a_subset(done, digits, stingrays, tmp_path):
    model = small(num_classes=1000, num_layers=1, moe_layers=None)
    # Class 7, which ImageNet-A does not have, then class 6, its stingrays.
    bias = np.zeros(1000)
    bias[7], bias[6] = 90.0, 80.0
    model.output_dense.kernel.assign(0.0 * model.output_dense.kernel)
    model.output_dense.bias.assign(bias)
    model.save_to_preset(tmp_path)
    arguments = ["evaluate", tmp_path, "--data", f"folder:{stingrays}"]
    arguments += ["--metrics", "accuracy", "--json"]
    output = done(*arguments, "--class-subset", "imagenet_a")
    figures = json.loads(output)
    assert (figures["classes"], figures["accuracy"]) == (200, 0.75)
