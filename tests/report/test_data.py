"""Data that a report refuses, and what it makes of the rest.

Axes: B batch.
"""

import json

import numpy as np
import pytest

from keras_moe import models
from keras_moe.report import write_report
from keras_moe.report._data import labels_of, routed_batches
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
    return list(routed_batches(reported_model(model), data, **kwargs))


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


def test_images_as_preprocessors_give_them(model):
    # Standardised, black, in float64, and those that lost a pixel.
    pixels = images(2, 16, 8, 3)
    broken = pixels.copy()
    broken[0, 0, 0] = np.nan
    for prepared in (6.0 * pixels, np.zeros((2, 16, 8, 3)), broken):
        assert len(batches_of(model, prepared)) == 1


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


def test_words_of_tokens_stand_for_captions(pairs_model):
    tokens = pairs_model.preprocessor(["two cats"])
    (batch,) = batches_of(pairs_model, {"images": images(1, 8, 8, 3), **tokens})
    assert batch.captions == ["two cats"]


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
