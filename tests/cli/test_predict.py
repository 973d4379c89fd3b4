import csv
import io
import json

import numpy as np
import pytest

from keras_moe import models
from tests.compare import assert_close
from tests.pipelines import save
from tests.refusals import refuses
from tests.small_models import small_pairs_model, with_weights

pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and photos of one grey each, in a folder and below it."""
    folder = tmp_path_factory.mktemp("predict")
    size = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "num_heads": 2}
    size |= {"moe_layers": None, "load_weights": False}
    model = models.from_preset("vmoe_digits", num_classes=2, **size)
    model.preprocessor = models.ImagePreprocessor(
        model.backbone.image_shape, class_names=["a [dark] one", "a light one"]
    )
    with_weights(model).save_to_preset(folder / "classes")
    pairs = small_pairs_model(["a cat", "a dog"])
    pairs = models.ContrastiveModel(
        pairs.backbone, pairs.preprocessor, models.ImagePreprocessor((8, 8, 3))
    )
    pairs.save_to_preset(folder / "pairs")
    for number, name in enumerate(["b.png", "below/c.png", "below/.hidden.png"]):
        save(folder / "photos" / name, 90 * number)
    (folder / "photos" / "notes.txt").write_text("no image")
    (folder / "broken").mkdir()
    (folder / "broken" / "a.png").write_bytes(b"no image")
    return folder


def test_a_folder_has_a_row_for_each_photo(folder, program, tmp_path):
    photos, file = folder / "photos", tmp_path / "photos.json"
    _, table, errors = program(
        *("predict", folder / "classes", photos, "--batch-size", 1, "--json", file)
    )
    assert f"are not read (1): {photos / 'notes.txt'}" in errors
    values = json.loads(file.read_text())
    paths = [photos / "b.png", photos / "below" / "c.png"]
    assert [row["photo"] for row in values] == [str(path) for path in paths]
    model = models.from_preset(str(folder / "classes"))
    for row, classes in zip(values, model.classify(paths), strict=True):
        assert "a [dark] one" in table
        assert [x["name"] for x in row["classes"]] == [x.name for x in classes]
        assert_close(
            [x["probability"] for x in row["classes"]], [x[1] for x in classes], 1e-5
        )
        assert f"{classes[0].probability:.2%}" in table


def test_lines_of_a_table(folder, done, tmp_path):
    arguments = ("predict", folder / "classes", folder / "photos/b.png")
    printed = done(*arguments, "--csv")
    (head, *rows) = csv.reader(io.StringIO(printed))
    assert head == ["photo", "rank", "name", "probability"]
    assert [row[:2] for row in rows] == [[str(arguments[2]), x] for x in "12"]
    assert sum(float(row[3]) for row in rows) == pytest.approx(1, abs=1e-5)
    done(*arguments, "--csv", tmp_path / "photo.csv")
    assert (tmp_path / "photo.csv").read_text() == printed


def test_texts_are_the_classes_of_an_image_text_model(folder, done):
    photo, texts = folder / "photos" / "b.png", ["a dog", "a cat"]
    printed = done("predict", folder / "pairs", photo, "--labels", *texts, "--json")
    (row,) = json.loads(printed)
    model = models.from_preset(str(folder / "pairs"), task="contrastive")
    (logits,) = model.similarity(str(photo), texts).astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-expected)
    assert [x["index"] for x in row["classes"]] == order.tolist()
    assert [x["name"] for x in row["classes"]] == [texts[i] for i in order]
    assert_close([x["probability"] for x in row["classes"]], expected[order], 1e-6)
    # One photo has one list, and several have one each.
    assert model.classify([photo], texts, top=1) == [model.classify(photo, texts, 1)]
    refuses("names to be a list", model.classify, photo, "a cat")


@pytest.mark.parametrize(("command", "message"), [
    ("classes photos/b.png --labels x", "no --labels for a model"),
    ("pairs photos/b.png", "Expected --labels"),
    ("classes broken", "broken/a.png (UnidentifiedImageError"),
    ("classes photos/b.png photos/notes.txt", "photos/notes.txt (Unidentified"),
    ("classes photos/none.png", "No such file or directory"),
    ("classes classes", "a folder with images"),
    ("classes photos/b.png --csv photos/c.png", "ends with .csv"),
])  # fmt: skip
def test_what_is_refused(folder, mistake, command, message):
    name, *arguments = command.split()
    paths = [folder / x if "/" in x or (folder / x).is_dir() else x for x in arguments]
    assert message in mistake("predict", folder / name, *paths)
