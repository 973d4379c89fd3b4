"""Evaluation of image-text models: batches of any sizes, real towers, baselines."""

import keras
import numpy as np
import pytest

from keras_moe import analysis, models, training
from keras_moe.evaluation import (
    contrastive_accuracy,
    encode_pairs,
    extract_features,
    few_shot,
    retrieval,
    zero_shot,
    zero_shot_from_model,
)
from tests.pair_models import one_block
from tests.refusals import refuses
from tests.small_models import images, with_weights

DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(40, 4))


class Towers:
    """Images hold a number, and texts too; batches are counted."""

    def __init__(self):
        self.sizes = []

    def encode_images(self, images, batch_size):
        self.sizes.append(len(images))
        return TABLE[np.asarray(images)[:, 0, 0, 0].astype(int)]

    def encode_text(self, texts, batch_size):
        if isinstance(texts, dict):
            numbers = texts["token_ids"][:, -1]
            assert texts["token_ids"].shape == texts["padding_mask"].shape
        else:
            assert isinstance(texts, list)
            numbers = [int(text.rpartition(" ")[2]) for text in texts]
        self.sizes.append(len(numbers))
        return TABLE[numbers] + 0.1


OWNER = [0, 0, 1, 2, 2, 2, 3, 1, 4, 4, 3]


def numbered(numbers):
    return np.full((len(numbers), 2, 2, 1), np.reshape(numbers, (-1, 1, 1, 1)))


def as_batches(size, tokens):
    """The pairs of OWNER, whose image ids are 100 above their indices."""
    for start in range(0, len(OWNER), size):
        owner = np.array(OWNER[start : start + size])
        rows = np.arange(start, start + len(owner))
        if tokens:
            ids = np.stack([0 * rows, rows], axis=1)
            texts = {"token_ids": ids, "padding_mask": ids >= 0}
        else:
            texts = {"captions": np.array([f"no {row}".encode() for row in rows])}
        ids = {"image_ids": owner + 100, "text_ids": rows // 2}
        yield {"images": numbered(owner), **texts}, ids


@pytest.mark.parametrize("tokens", [True, False])
def test_pairs_are_embedded_in_full_batches(tokens):
    model = Towers()
    embeddings = encode_pairs(model, as_batches(3, tokens), batch_size=4)
    # Five images and eleven texts, each once.
    assert sorted(model.sizes) == [1, 3, 4, 4, 4]
    np.testing.assert_array_equal(embeddings.images, TABLE[:5])
    np.testing.assert_array_equal(embeddings.texts, TABLE[:11] + 0.1)
    assert embeddings.image_of_text.tolist() == OWNER
    texts = np.arange(11) // 2
    expected = retrieval(TABLE[:5], TABLE[:11] + 0.1, OWNER, (1, 3), text_ids=texts)
    received = encode_pairs(model, as_batches(2, tokens)).retrieval(ks=(1, 3))
    assert received.figures() == expected.figures()
    # Each image is there once, with its first text.
    first = [0, 2, 3, 6, 8]
    expected = contrastive_accuracy(
        TABLE[:5], TABLE[first] + 0.1, 5, text_ids=texts[first]
    )
    received = encode_pairs(model, as_batches(11, tokens)).contrastive_accuracy(5)
    assert received == expected
    refuses("batch_size=6", embeddings.contrastive_accuracy, 6)
    (arrays,) = as_batches(11, tokens)
    assert encode_pairs(model, arrays).image_of_text.tolist() == OWNER
    assert encode_pairs(model, (arrays[0], None)).image_of_text.tolist() == [*range(11)]


def test_classes_and_images_of_arrays_and_batches():
    model, labels = Towers(), np.array([0, 1, 2, 2, 1, 0])
    numbers = np.array([0, 1, 2, 12, 22, 9])
    classes = TABLE[:3] + 0.1
    expected = zero_shot(TABLE[numbers], labels, classes)
    arguments = list("012"), "digit {}"
    received = zero_shot_from_model(model, numbered(numbers), labels, *arguments)
    np.testing.assert_array_equal(received.ranks, expected.ranks)
    batches = [(numbered(numbers[:4]), labels[:4]), (numbered(numbers[4:]), labels[4:])]
    model.sizes.clear()
    received = zero_shot_from_model(model, batches, None, *arguments)
    # The texts, and two full batches of images.
    assert model.sizes == [3, 4, 4]
    np.testing.assert_array_equal(received.ranks, expected.ranks)
    figures = training.ZeroShot(batches, *arguments)(model)
    assert figures == expected.figures()
    # Five images have no R@10.
    figures = training.Retrieval(list(as_batches(4, True)), None, 1024)(model)
    assert {"image_to_text_r5", "contrastive_accuracy"} < set(figures)
    figures = training.Retrieval(list(as_batches(4, True)), (1, 2), 5)(model)
    ways = ("image_to_text", "text_to_image")
    recalls = {f"{way}_r{k}" for way in ways for k in (1, 2)}
    assert set(figures) == recalls | {"contrastive_accuracy"}


def make(**moe):
    """A small LIMoE with a tokenizer, whose experts matter."""
    tokenizer = models.TextTokenizer.trained(WORDS, 515, max_length=6)
    backbone = one_block(
        "limoe", {"auxiliary_losses": None, **moe}, vocabulary_size=520
    )
    return with_weights(models.ContrastiveModel(backbone, tokenizer))


WORDS = ["red", "green", "blue", "dark", "light"]


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.filterwarnings("ignore:1 of 8 captions")
def test_a_model_with_capacity_16_dropless_or_pruned():
    model = make()
    photos, owner = images(6, 8, 8, 3), np.array([0, 0, 1, 2, 2, 3, 4, 5])
    captions = [WORDS[i] for i in (0, 1, 2, 3, 4, 0, 1, 2)]
    inputs = {"images": photos[owner], **model.preprocessor(captions)}
    pairs = inputs, {"image_ids": owner}
    dropless = encode_pairs(model, pairs, batch_size=4)
    whole = model.predict(inputs, verbose=0)
    expected = whole["image_embeddings"][[0, 2, 3, 5, 6, 7]]
    np.testing.assert_allclose(dropless.images, expected, atol=2e-6)
    np.testing.assert_allclose(dropless.texts, whole["text_embeddings"], atol=2e-6)
    # The paper's evaluation, with a capacity that drops nothing.
    official = make(evaluation="official", eval_capacity_factor=16.0)
    for weight, value in zip(official.weights, model.weights):
        weight.assign(np.array(keras.ops.convert_to_numpy(value)))
    received = encode_pairs(official, pairs, batch_size=4)
    np.testing.assert_allclose(received.images, dropless.images, atol=2e-6)
    np.testing.assert_allclose(received.texts, dropless.texts, atol=2e-6)
    # One expert fewer in each block.
    pruned = analysis.prune_experts(model, {"block_0": [0, 2, 3]})
    recalls = training.Retrieval(pairs, (1,))(pruned)
    assert set(recalls) == {"image_to_text_r1", "text_to_image_r1"}
    pool = photos, np.arange(6) % 2
    result = zero_shot_from_model(pruned, *pool, ["red", "blue"], batch_size=6)
    assert (result.ks, len(result.ranks)) == ((1,), 6)
    actual = training.FewShot(pool, pool, (1,), seeds=(0,))(model)
    pool = extract_features(model.encode_images, pool, verbose=0)
    expected = few_shot(*pool, *pool, (1,), seeds=(0,))
    assert actual == {"1_shot": pytest.approx(expected.mean[0])}
