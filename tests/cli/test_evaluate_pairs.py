"""`keras-moe evaluate` of models of pairs: on captions, and on classes."""

import json

import keras
import numpy as np
import pytest

from keras_moe import data, evaluation, models
from keras_moe.cli import evaluate
from keras_moe.cli._inputs import find_examples
from keras_moe.cli.main import make_parser
from tests.pair_models import limoe
from tests.pipelines import save
from tests.small_models import with_weights

pytest.importorskip("tensorflow")

CAPTIONS = ("a red one", "a dark one", "nothing", "red and dark", "a red one")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small dense model of pairs with its tokenizer, and its folder."""
    sizes = {"image_shape": (16, 16, 1), "vocabulary_size": 520, "max_length": 12}
    tokenizer = models.TextTokenizer.trained(CAPTIONS, 520, max_length=12)
    model = models.ContrastiveModel(limoe(None, **sizes), tokenizer)
    folder = tmp_path_factory.mktemp("pairs") / "preset"
    with_weights(model).save_to_preset(folder)
    return model, folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four images in a folder, one of which has two captions."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "test").mkdir()
    lines = ["image,caption"]
    for number, caption in zip((0, 1, 2, 3, 0), CAPTIONS):
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 1), "uint8")
        name = f"{number}.png"
        keras.utils.save_img(folder / "test" / name, pixels, scale=False)
        lines.append(f"{name},{caption}")
    (folder / "test" / "captions.csv").write_text("\n".join(lines))
    return folder


def test_retrieval_of_captions(program, saved, photos, done):
    model, folder = saved
    arguments = ("evaluate", folder, "--data", f"folder:{photos}", "--batch-size", 3)
    output = done(*arguments, "--json")
    figures = json.loads(output)
    pairs = data.load_pairs(
        f"folder:{photos}", "test", (16, 16, 1), 5, captions="all", shuffle=False
    )
    expected = evaluation.encode_pairs(model, pairs)
    assert (figures["images"], figures["captions"]) == expected.images.shape[:1] + (5,)
    # There are four images only.
    assert figures["retrieval"] == expected.retrieval((1,)).figures()
    # Each image is there once.
    accuracy = expected.contrastive_accuracy(4)
    assert figures["contrastive_accuracy"]["accuracy"] == accuracy.accuracy
    assert figures["contrastive_accuracy"]["batch_size"] == 4
    assert "zero_shot" not in figures
    output = program(*arguments, "--metrics", "contrastive_accuracy").output
    assert "contrastive accuracy in 4" in output
    assert "R@1" not in output


def test_classes_of_digits(done, saved, tmp_path):
    model, folder = saved
    (tmp_path / "names.txt").write_text("\n".join(f"red {n}" for n in range(10)))
    (tmp_path / "templates.json").write_text('["{}", "a {} one"]')
    output = done(
        "evaluate", folder, "--data", "digits", "--json", "--shots", 1,
        "--metrics", "contrastive_accuracy", "zero_shot", "few_shot", "--class-names",
        tmp_path / "names.txt", "--templates", tmp_path / "templates.json",
    )  # fmt: skip
    figures = json.loads(output)
    expected = evaluation.zero_shot_from_model(
        model, *data.load_digits("test", (16, 16, 1)), [f"red {n}" for n in range(10)],
        ["{}", "a {} one"],
    )  # fmt: skip
    assert figures["zero_shot"]["top_1"] == pytest.approx(
        expected.accuracy[0], abs=0.01
    )
    assert figures["zero_shot"]["classes"] == 10
    assert 0 < figures["few_shot"]["1_shot"]["mean"] < 1
    # The accuracy of pairs counts their images, and that of classes its own.
    assert figures["images"] == figures["zero_shot"]["images"] == 450


def data_of(*arguments, **recipe):
    args = make_parser().parse_args(["evaluate", "x", *map(str, arguments)])
    examples = find_examples(args, recipe)
    metrics = evaluate.pair_metrics(examples, args)
    if "zero_shot" in metrics:
        return examples, metrics, evaluate.zero_shot_prompts(examples, args)
    return examples, metrics, None


def test_a_subset_of_imagenet_has_its_names_and_places(tmp_path):
    for wordnet_id in ("n01531178", "n01498041"):
        save(tmp_path / "photos" / "test" / wordnet_id / "a.png", 0)
    (tmp_path / "names.txt").write_text("\n".join(map(str, range(1000))))
    subset = ("--data", f"folder:{tmp_path / 'photos'}", "--class-subset", "imagenet_a")
    names = ("--class-names", tmp_path / "names.txt")
    _, _, prompts = data_of(*subset, *names, "--metrics", "zero_shot")
    assert prompts.class_names[:2] == ("6", "11")
    assert len(prompts.class_names) == 200
    # Folders in order: stingrays, goldfinches.
    assert prompts.indices.tolist() == [0, 1]


def test_settings_of_a_run_are_those_of_its_evaluation(photos):
    run = {"source": f"folder:{photos}", "unreadable": "exclude", "exclude": "bad.json"}
    examples, *_ = data_of(**run)
    assert examples.options == {"unreadable": "exclude"}
    # Images are left out of the split that they are numbers of.
    assert examples.excluded == {"train": "bad.json"}
    assert data_of(**run, train_split="test")[0].excluded == {"test": "bad.json"}
    options = ("--data-options", "exclude=[0]", "unreadable=exclude")
    examples, *_ = data_of("--data", f"folder:{photos}", *options)
    assert examples.excluded == {"test": [0]}
    ((inputs, _),) = examples.pairs((16, 16, 1), 8, captions="all")
    assert len(inputs["images"]) == 3
    examples, *_ = data_of("--data", "digits", *options)
    images, _ = next(iter(examples.images("test", (8, 8, 1), 500)))
    assert len(images) == 449
