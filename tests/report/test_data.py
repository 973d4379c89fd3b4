"""Data that a report refuses, and what it makes of the rest.

Axes: B batch.
"""

import json

import numpy as np
import pytest

from keras_moe import models
from keras_moe.report import write_report
from keras_moe.report._data import RoutedData, labels_of
from keras_moe.report.model import reported_model
from tests.small_models import images, small_classifier, small_pairs_model

SURROGATE = "a\ud800b"


@pytest.fixture(scope="module")
def model():
    return small_classifier()


@pytest.fixture(scope="module")
def pairs_model():
    return small_pairs_model(["a cat", "two cats"])


def batches_of(model, data, **kwargs):
    return list(RoutedData(reported_model(model), **kwargs).batches(data))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array([2.0, 0.0]), [2, 0]),
        (np.array([[2], [1]], "uint8"), [2, 1]),
        (np.eye(3, dtype="float32")[[2, 0]], [2, 0]),
        # No label, and several.
        (np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), [-1, -1, 1]),
        (np.array([[2, -1], [0, 2], [-1, -1]]), [2, -1, -1]),
        ({"image_ids": [1], "text_ids": [2]}, None),
        (None, None),
    ],
)
def test_labels(labels, expected):
    result = labels_of(labels)
    assert (None if result is None else result.tolist()) == expected


@pytest.mark.parametrize(
    "labels",
    [
        [0.5, 1.0],
        [np.nan, 1.0],
        [np.inf, 1.0],
        ["cat", "dog"],
        [[0.3, 0.7], [0.0, 1.0]],
        [[3, 7], [-2, 1]],
        np.zeros((2, 8, 8, 3)),
        5,
    ],
)
def test_labels_that_are_none(labels):
    with pytest.raises(
        ValueError, match=r"Expected labels as whole.*; received: shape"
    ):
        labels_of(labels)


def test_a_batch_without_labels_leaves_those_of_others(model):
    pixels, labels = images(3, 16, 8, 3), np.array([2, 0, 1])
    (batch,) = batches_of(model, [(pixels, labels), pixels[:2], (pixels, labels)])
    assert batch.labels.tolist() == [2, 0, 1, -1, -1, 2, 0, 1]


@pytest.mark.parametrize(
    "prepared",
    [np.uint8, np.int32, lambda x: 127.5 * (x + 1.0), lambda x: x > 0],
)
def test_images_that_nobody_prepared_are_refused(model, prepared):
    pixels = np.linspace(-1, 1, 768, dtype="float32").reshape(2, 16, 8, 3)
    pixels = prepared(pixels) if callable(prepared) else pixels
    with pytest.raises(ValueError, match=r"in \[-1, 1\] as .*received: dtype="):
        batches_of(model, pixels)


def test_images_as_preprocessors_give_them(model):
    # Standardised, black, in float64, and those that lost a pixel.
    pixels = images(2, 16, 8, 3)
    broken = pixels.copy()
    broken[0, 0, 0] = np.nan
    for prepared in (6.0 * pixels, np.zeros((2, 16, 8, 3)), broken):
        assert len(batches_of(model, prepared)) == 1
    preprocessor = models.ImagePreprocessor((16, 8, 3), mean=0.0, std=1 / 255)
    model.preprocessor, before = preprocessor, model.preprocessor
    try:
        assert len(batches_of(model, 127.5 * (np.tanh(pixels) + 1.0))) == 1
    finally:
        model.preprocessor = before


def test_inputs_of_other_names(model):
    with pytest.raises(ValueError, match=r"Expected images, .*a dict of \['x'\]"):
        batches_of(model, {"x": images(2, 16, 8, 3)})


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["a cat", None], "Expected texts; received: None"),
        (["a cat", 3], "Expected texts; received: 3, int"),
        ("a cat", "Expected captions as a list"),
        (7, "Expected captions as a list|a row for each example"),
    ],
)
def test_captions_that_are_no_texts(pairs_model, captions, message):
    pixels = images(2, 8, 8, 3)
    for data in ((pixels, captions), [(pixels, captions)]):
        with pytest.raises(ValueError, match=f"{message}|lengths"):
            batches_of(pairs_model, data)


def test_captions_are_tokenised_batch_by_batch(pairs_model, monkeypatch):
    sizes, call = [], models.TextTokenizer.__call__
    monkeypatch.setattr(
        models.TextTokenizer,
        "__call__",
        lambda self, texts: sizes.append(len(texts)) or call(self, texts),
    )
    captions = [f"{n} cats" for n in range(300)]
    pixels = np.zeros((300, 8, 8, 3), "float32")
    batches = batches_of(pairs_model, {"images": pixels, "captions": captions})
    assert sizes == [256, 44]
    assert [x for batch in batches for x in batch.captions] == captions


def test_captions_of_some_batches(pairs_model):
    pixels = images(1, 8, 8, 3)
    tokens = pairs_model.preprocessor(["two cats"])
    data = [(pixels, ["a  cat"]), {"images": pixels, **tokens}]
    (batch,) = batches_of(pairs_model, data)
    # The words of tokens stand for a caption that is not given.
    assert batch.captions == ["a  cat", "two cats"]


def test_halves_of_characters_are_replaced(model, pairs_model, tmp_path):
    about = reported_model(model, SURROGATE, [SURROGATE, b"\xff", 3, "x" * 600])
    assert about.name == "a\ufffdb"
    assert about.class_names[:3] == ("a\ufffdb", "\ufffd", "3")
    assert len(about.class_names[3]) == 300
    (batch,) = batches_of(pairs_model, (images(1, 8, 8, 3), [SURROGATE]))
    assert batch.captions == ["a\ufffdb"]
    data = images(2, 16, 8, 3), np.array([0, 1])
    written = write_report(
        model,
        data,
        tmp_path / "r",
        name=SURROGATE,
        class_names=[SURROGATE] * 3,
        verbose=0,
    )
    assert "a\ufffdb" in written.page.read_text(encoding="utf-8")


def test_labels_without_a_name_are_refused(model, tmp_path):
    pixels, labels = images(3, 16, 8, 3), np.array([-1, 1, 2])
    message = "of all classes of the labels; received: 2 class_names, and label 2"
    for data in ((pixels, labels), iter([(pixels, labels)])):
        with pytest.raises(ValueError, match=message):
            write_report(model, data, tmp_path / "r", class_names=["a", "b"], verbose=0)
    assert not (tmp_path / "r").exists()


def test_an_old_list_of_pictures_deletes_nothing_else(model, tmp_path):
    folder = tmp_path / "r"
    pixels = images(2, 16, 8, 3)
    first = write_report(model, pixels, folder, verbose=0)
    values = json.loads(first.data.read_text())
    others = ["mine.txt", "notes", "../up.png", 3, None]
    values["pictures"] += others
    first.data.write_text(json.dumps(values))
    (folder / "mine.txt").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "loads.png").write_text("mine")
    (folder / "old.png").write_text("mine")
    (tmp_path / "up.png").write_text("mine")
    written = write_report(model, pixels, folder, verbose=0)
    assert written.pictures == first.pictures
    for kept in ("mine.txt", "notes/loads.png", "old.png", "../up.png"):
        assert (folder / kept).read_text() == "mine"
