"""The data that a report takes, and what it makes of it."""

import json

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_moe import layers, models
from keras_moe._batches import stratified
from keras_moe.report import write_report
from keras_moe.report._data import labels_of, routed_batches
from keras_moe.report.model import reported_model
from tests.compare import assert_same
from tests.small_models import images, small_classifier, small_pairs_model

SURROGATE = "a\ud800b"


@pytest.fixture(scope="module")
def model():
    return small_classifier()


@pytest.fixture(scope="module")
def pairs_model():
    return small_pairs_model(["a cat", "two cats", "a dog and a cat"])


def batches_of(model, data, **kwargs):
    return list(routed_batches(reported_model(model), data, **kwargs))


@pytest.mark.parametrize(("labels", "expected"), [
    (np.array([2.0, 0.0]), [2, 0]),
    (np.array([[2], [1]], "uint8"), [2, 1]),
    (np.eye(3, dtype="float32")[[2, 0]], [2, 0]),
    # No label, and several.
    (np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), [-1, -1, 1]),
    (np.array([[2, -1], [0, 2], [-1, -1]]), [2, -1, -1]),
    ({"image_ids": [1], "text_ids": [2]}, None),
    (None, None),
])  # fmt: skip
def test_labels(labels, expected):
    result = labels_of(labels)
    assert (None if result is None else result.tolist()) == expected


@pytest.mark.parametrize("head", [None, "mumoe"])
def test_routing_is_the_models_own(head):
    if head is not None:
        head = layers.MuMoE(3, num_experts=2, rank=2)
    model = small_classifier(head=head)
    pixels = images(5, 16, 8, 3)
    batches = batches_of(model, (pixels, np.arange(5) % 3), batch_size=2)
    assert [batch.start for batch in batches] == [0, 2, 4]
    assert [batch.size for batch in batches] == [2, 2, 1]
    expected = keras.Model(model.input, model.routing).predict(pixels, verbose=0)
    for key, its in expected.items():
        parts = zip(*(x.routing[key] for x in batches))
        for mine, values in zip(parts, its, strict=True):
            mine = np.concatenate(mine)
            np.testing.assert_allclose(mine, values, rtol=1e-5, atol=1e-6)
    outputs = np.concatenate([x.outputs for x in batches])
    logits = model.predict(pixels, verbose=0)
    np.testing.assert_allclose(outputs, logits, rtol=1e-4, atol=1e-5)


class Pixels(keras.utils.PyDataset):
    """Two batches, of which the last has padding without weight."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        pixels = images(5, 16, 8, 3)
        if not index:
            return pixels[:3], np.array([0, 1, 2]), np.ones(3)
        padded = np.concatenate([pixels[3:], pixels[:1]])
        return padded, np.array([0, 1, 2]), np.array([1.0, 1.0, 0.0])


@pytest.mark.parametrize("kind", ["batches", "one_hot", "dataset"])
def test_data_of_any_kind_is_the_same(model, kind):
    pixels, labels = images(5, 16, 8, 3), np.array([0, 1, 2, 0, 1])
    data = {
        "batches": [(pixels[:4], labels[:4]), (pixels[4:], labels[4:])],
        "one_hot": (pixels, np.eye(3)[labels]),
        "dataset": Pixels(),
    }[kind]
    batches = batches_of(model, data, batch_size=4)
    assert [batch.size for batch in batches] == [4, 1]
    np.testing.assert_array_equal(np.concatenate([x.labels for x in batches]), labels)
    np.testing.assert_array_equal(np.concatenate([x.images for x in batches]), pixels)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (3, [2, 1]), (9, [2, 2, 2])])
def test_no_more_is_read_than_is_needed(model, largest, sizes):
    def endless():
        for _ in range(-(-min(largest, 6) // 3)):
            yield images(3, 16, 8, 3)
        if largest < 9:
            raise AssertionError("Too much was read.")

    batches = batches_of(model, endless(), batch_size=2, max_examples=largest)
    assert [batch.size for batch in batches] == sizes


def test_drawn_by_class():
    # Eight, four and one: one of each, then as large parts of each.
    labels = np.repeat([0, 1, 2], [8, 4, 1])
    counts = {
        number: np.bincount(labels[stratified(labels, number, 0)], minlength=3).tolist()
        for number in (3, 7, 13)
    }
    assert counts == {3: [1, 1, 1], 7: [4, 2, 1], 13: [8, 4, 1]}
    assert stratified(labels, 7, 0).tolist() == sorted({*stratified(labels, 7, 0)})
    assert not np.array_equal(stratified(labels, 7, 0), stratified(labels, 7, 1))
    # Of more classes than examples, some.
    assert len({*stratified(np.arange(9), 4, 0)}) == 4


@pytest.mark.parametrize("kind", ["arrays", "batches", "unlabelled", "iterator"])
def test_some_of_sorted_data(model, kind, tmp_path):
    pixels, labels = images(12, 16, 8, 3), np.repeat([0, 1, 2], 4)
    parts = [(pixels[i : i + 3], labels[i : i + 3]) for i in range(0, 12, 3)]
    data = {
        "arrays": (pixels, labels), "batches": parts, "unlabelled": pixels,
        "iterator": iter(parts),
    }[kind]  # fmt: skip
    written = write_report(model, data, tmp_path / "r", max_examples=6, verbose=0)
    values = json.loads(written.data.read_text())
    page = written.page.read_text(encoding="utf-8")
    assert written.num_examples == values["examples"] == 6
    if kind == "iterator":
        assert "<span>classes</span> 2" in page
        assert "<span>accuracy on the first 6</span>" in page
        return
    assert values["examples_in_data"] == 12
    assert "<span>examples</span> 6 of 12, drawn with seed 0" in page
    if kind == "unlabelled":
        return
    numbers = stratified(labels, 6, 0)
    by_class = np.array(values["sections"]["loads"]["block_1"]["by_class"]).sum(axis=1)
    # Two images of each class, with nine tokens of two experts.
    assert by_class.tolist() == [36, 36, 36]
    hits = model.predict(pixels[numbers], verbose=0).argmax(-1) == labels[numbers]
    assert f"<span>accuracy on 6 of 12</span> {hits.mean():.1%}" in page
    assert "<span>classes</span> 3" in page


def test_captions_become_words(pairs_model):
    captions = ["a cat", b"two cats"]
    data = {"images": images(2, 8, 8, 3), "captions": captions}
    (batch,) = batches_of(pairs_model, data)
    assert batch.captions == ["a cat", "two cats"]
    assert batch.words[0][:4] == ["<|startoftext|>", "a", "cat", "<|endoftext|>"]
    assert batch.words[0][4:] == [""] * 4
    mask = pairs_model.preprocessor(["a cat", "two cats"])["padding_mask"]
    np.testing.assert_array_equal(batch.masks["text"], mask)
    assert batch.masks["image"].shape == (2, 4)
    texts = pairs_model.preprocessor(captions[:1])
    tokens = batches_of(pairs_model, {"images": images(1, 8, 8, 3), **texts})[0]
    assert tokens.words[0] == batch.words[0]
    assert tokens.captions == ["a cat"]
    given = batches_of(pairs_model, (images(2, 8, 8, 3), ["a cat", "two cats"]))
    assert given[0].captions == batch.captions


def test_images_as_preprocessors_give_them(model):
    # Standardised, black, in float64, and those that lost a pixel.
    pixels = images(2, 16, 8, 3)
    broken = pixels.copy()
    broken[0, 0, 0] = np.nan
    half = pixels.astype(ml_dtypes.bfloat16)
    for prepared in (6.0 * pixels, np.zeros((2, 16, 8, 3)), broken, half):
        assert len(batches_of(model, prepared)) == 1
    raw = small_classifier(
        preprocessor=models.ImagePreprocessor((16, 8, 3), mean=0.0, std=1 / 255)
    )
    assert len(batches_of(raw, 255 * (pixels > 0).astype("float32"))) == 1


def test_the_global_policy_changes_no_routing(model):
    pixels = images(2, 16, 8, 3)
    (expected,) = batches_of(model, pixels)
    keras.config.set_dtype_policy("mixed_bfloat16")
    (batch,) = batches_of(model, pixels)
    assert_same(batch.routing["block_1"], expected.routing["block_1"])
    np.testing.assert_array_equal(batch.outputs, expected.outputs)


def test_halves_of_characters_are_replaced(model, pairs_model, tmp_path):
    about = reported_model(model, SURROGATE, [SURROGATE, b"\xff", 3, "x" * 600])
    assert about.name == "a\ufffdb"
    assert about.class_names[:3] == ("a\ufffdb", "\ufffd", "3")
    assert len(about.class_names[3]) == 300
    (batch,) = batches_of(pairs_model, (images(1, 8, 8, 3), [SURROGATE]))
    assert batch.captions == ["a\ufffdb"]
    data = images(2, 16, 8, 3), np.array([0, 1])
    names = {"name": SURROGATE, "class_names": [SURROGATE] * 3}
    written = write_report(model, data, tmp_path / "r", **names, verbose=0)
    assert "a\ufffdb" in written.page.read_text(encoding="utf-8")


def test_an_old_list_of_pictures_deletes_nothing_else(model, tmp_path):
    folder = tmp_path / "r"
    pixels = images(2, 16, 8, 3)
    first = write_report(model, pixels, folder, verbose=0)
    values = json.loads(first.data.read_text())
    others = ["mine.txt", "../up.png", 3]
    values["pictures"] += others
    first.data.write_text(json.dumps(values))
    (folder / "mine.txt").write_text("mine")
    (folder / "old.png").write_text("mine")
    (tmp_path / "up.png").write_text("mine")
    written = write_report(model, pixels, folder, verbose=0)
    assert written.pictures == first.pictures
    for kept in ("mine.txt", "old.png", "../up.png"):
        assert (folder / kept).read_text() == "mine"


def test_a_language_model_takes_texts_and_their_ids():
    model = models.from_preset("moepp_lm_python", load_weights=False, num_layers=2)
    reported = reported_model(model)
    texts = ["def f(x):", "return x"]
    ids = model.preprocessor(texts)["token_ids"]
    expected = list(routed_batches(reported, {"captions": texts}))
    for given in (texts, np.array(texts, object), ids):
        (batch,) = routed_batches(reported, given)
        assert batch.size == 2
        for key, record in expected[0].routing.items():
            actual = batch.routing[key].gates
            np.testing.assert_allclose(actual, record.gates, atol=1e-6)
