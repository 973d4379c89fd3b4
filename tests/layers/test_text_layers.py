"""Layers of texts: embeddings, places, and pooling by a mask, by hand."""

import numpy as np
import pytest
from keras import ops

from keras_moe import layers
from tests.compare import assert_close, assert_same, to_numpy
from tests.gradients import gradient
from tests.refusals import refuses

TOKENS = np.arange(12, dtype="float32").reshape(2, 6, 1)
MASK = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], "bool")
IDS = np.array([[8, 3, 9, 9, 9, 9], [9, 1, 2, 7, 2, 7]], "int32")


@pytest.mark.parametrize(("pooling", "options", "expected"), [
    ("first", {}, [0, 7]),
    ("last", {}, [3, 11]),
    ("average", {}, [1.5, 9]),
    ("max", {}, [3, 11]),
    # The first 9 that is no padding, and the first 7.
    ("end_of_text", {}, [2, 9]),
    ("end_of_text", {"end_of_text_id": 2}, [3, 8]),
])  # fmt: skip
def test_pooling_by_a_mask(pooling, options, expected):
    layer = layers.MaskedPooling(pooling, **options)
    # Padding may hold anything.
    tokens = np.where(MASK[..., None], TOKENS, np.inf)
    pooled = to_numpy(layer(tokens, mask=MASK, token_ids=IDS))
    assert_same(pooled[:, 0], expected)


def test_pooling_without_a_mask_takes_all():
    for pooling, expected in (("first", [0, 6]), ("last", [5, 11])):
        pooled = to_numpy(layers.MaskedPooling(pooling)(TOKENS))
        assert_same(pooled[:, 0], expected)
    largest = to_numpy(layers.MaskedPooling("max")(-TOKENS))
    assert_same(largest[:, 0], [0, -6])
    for pooling in ("average", "max"):
        layer = layers.MaskedPooling(pooling)
        nothing = to_numpy(layer(TOKENS, mask=np.zeros_like(MASK)))
        assert_same(nothing, np.zeros((2, 1)))
        assert layer(TOKENS[:0], mask=MASK[:0]).shape == (0, 1)
    largest = layers.MaskedPooling("end_of_text")(TOKENS, token_ids=IDS)
    assert_same(to_numpy(largest)[:, 0], [2, 6])


def test_the_largest_tokens_get_the_gradient():
    tokens = np.array([[[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]], [[7.0, 7.0]] * 3])
    mask = np.array([[1, 1, 0], [0, 0, 0]], "bool")
    layer = layers.MaskedPooling("max")
    (received,) = gradient(
        lambda x: ops.sum(layer(x, mask=mask)), tokens.astype("float32")
    )
    expected = np.zeros_like(tokens)
    expected[0, 0, 1] = expected[0, 1, 0] = 1
    assert_same(received, expected)


def test_a_probe_reads_no_padding():
    layer = layers.AttentionPooling(num_heads=1, mlp_dim=4)
    tokens = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    expected = to_numpy(layer(tokens, mask=MASK))
    other = np.where(MASK[..., None], tokens, 5.0).astype("float32")
    assert_close(layer(other, mask=MASK), expected, atol=1e-6)
    assert np.abs(to_numpy(layer(other)) - expected).max() > 1e-3
    shorter = to_numpy(layer(tokens[:1, :4]))
    assert_close(shorter, expected[:1], atol=1e-6)


@pytest.mark.parametrize(
    "mask", [MASK, MASK[:, None] & MASK[..., None]], ids=["tokens", "pairs"]
)
def test_attention_takes_lists_as_masks(mask, op_by_op):
    layer, tokens = layers.Attention(1, 4), np.ones((2, 6, 4), "float32") * TOKENS
    expected = to_numpy(layer(tokens, mask=mask))
    as_list = to_numpy(layer(tokens, mask=mask.tolist()))
    assert_same(as_list, expected)
    assert np.abs(to_numpy(layer(tokens)) - expected).max() > 1e-3
    with pytest.raises(ValueError, match=r"\(2, 6\) or \(2, 6, 6\); received: mask.sh"):
        layer(tokens, mask=mask[:, 1:].tolist())
    refuses(r"mask\.dtype=float", layer, tokens, mask=mask.astype(float).tolist())


def test_places_of_short_texts():
    layer = layers.TextPositions(max_length=4)
    tokens = np.ones((2, 3, 5), "float32")
    difference = to_numpy(layer(tokens)) - tokens
    table = to_numpy(layer.embedding)
    assert_close(difference, np.repeat(table[:, :3], 2, 0), atol=1e-6)
