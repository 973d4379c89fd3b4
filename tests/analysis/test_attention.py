"""Attention rollout, against NumPy that reads the layers' weights."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.analysis import attention_rollout
from tests.pair_models import IMAGE, MOE, clip
from tests.small_models import images, small_classifier, small_pairs_model, with_weights

GRID = (4, 2)


def numpy(weight):
    return ops.convert_to_numpy(weight).astype("float64")


def attention(layer, queries, keys):
    """Mean over heads of the attention weights, from (B, N, D) and (B, M, D)."""
    queries, keys = layer.query_dense(queries), layer.key_dense(keys)
    if layer.query_key_norm:
        queries, keys = layer.query_norm(queries), layer.key_norm(keys)
    logits = ops.einsum("bnhk,bmhk->bhnm", queries, keys) / queries.shape[-1] ** 0.5
    return numpy(ops.mean(ops.softmax(logits), axis=1))


def expected_rollout(blocks, inputs, row, grid):
    """The product over all blocks, and the given mix of its rows."""
    rollout = np.eye(inputs[0].shape[1])
    for block, tokens in zip(blocks, inputs):
        tokens = block.mixer_norm(tokens)
        weights = attention(block.token_mixer, tokens, tokens)
        rollout = (0.5 * weights + 0.5 * np.eye(len(weights[0]))) @ rollout
    shares = (row @ rollout)[:, 0, -grid[0] * grid[1] :]
    return (shares / shares.sum(axis=1, keepdims=True)).reshape(-1, *grid)


def traced(backbone, pixels):
    """Block inputs of an image backbone and its output, in this order."""
    first = backbone.get_layer("block_0").input
    middle = backbone.features["block_0"]
    return keras.Model(backbone.input, [first, middle, backbone.output]).predict(
        pixels, verbose=0
    )


def rows_of(pooling, count, pooler, tokens, registers=0):
    """Weights of the tokens in the embedding, (1 or B, 1, N)."""
    if pooling == "map":
        probe = np.repeat(numpy(pooler.probe), len(tokens), axis=0)
        return attention(pooler.attention, probe.astype("float32"), tokens)
    row = np.ones(count)
    if pooling == "patch_average":
        row[: 1 + registers] = 0
    elif pooling != "average":
        row[1:] = 0
    return row[None, None] / row.sum()


@pytest.mark.every_backend
@pytest.mark.parametrize(("pooling", "fields"), [
    ("class_token", {"query_key_norm": True}),
    ("patch_average", {}),
    ("patch_average", {"register_tokens": 2}),
    ("average", {"class_token": False}),
    ("map", {"query_key_norm": True, "class_token": False}),
])  # fmt: skip
def test_rollout_is_the_product_of_attention(pooling, fields):
    model = small_classifier(pooling=pooling, **fields)
    pixels, backbone = images(), model.backbone
    before = model.predict(pixels, verbose=0)
    maps = attention_rollout(model, pixels, batch_size=2)
    *inputs, outputs = traced(backbone, pixels)
    registers = fields.get("register_tokens", 0)
    row = rows_of(pooling, outputs.shape[1], model.pooler, outputs, registers)
    blocks = [backbone.get_layer(name) for name in backbone.block_names]
    expected = expected_rollout(blocks, inputs, row, GRID)
    np.testing.assert_allclose(maps, expected, rtol=2e-4, atol=1e-6)
    # It depends on the image, and on the position.
    assert np.std(expected, axis=0).max() > 1e-3
    assert maps.dtype == "float32"
    np.testing.assert_array_equal(model.predict(pixels, verbose=0), before)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float16"])
def test_low_precision_has_maps_in_float32(dtype):
    model = small_classifier(pooling="map", class_token=False)
    low = small_classifier(pooling="map", class_token=False, dtype=dtype)
    low.set_weights(model.get_weights())
    maps = attention_rollout(low, images())
    assert maps.dtype == "float32"
    np.testing.assert_allclose(maps.sum(axis=(1, 2)), 1.0, rtol=1e-5)
    # Three digits of bfloat16, in shares of about an eighth.
    np.testing.assert_allclose(maps, attention_rollout(model, images()), atol=0.02)


def test_uniform_attention_has_a_closed_form():
    model = small_classifier(pooling="first", class_token=False, num_layers=3)
    for weight in model.weights:
        if "/query/" in weight.path:
            weight.assign(np.zeros(weight.shape))
    # Half of the first patch stays in each block, and the rest is spread over all.
    expected = np.full(GRID, (1 - 0.5**3) / 8)
    expected[0, 0] += 0.5**3
    maps = attention_rollout(model, images())
    np.testing.assert_allclose(maps, [expected] * 3, rtol=1e-5)


def test_image_towers_of_pairs():
    pixels = images(2, 8, 8, 3)
    limoe = small_pairs_model(["a cat", "two dogs"])
    backbone = limoe.backbone
    texts = limoe.preprocessor(["a cat", "two dogs"])
    symbols = [
        backbone.get_layer("embedding_dropout").output,
        backbone.features["image/block_0"],
    ]
    inputs = keras.Model(backbone.input, symbols).predict(
        {"images": pixels, **texts}, verbose=0
    )
    blocks = [backbone.get_layer(f"block_{index}") for index in range(2)]
    # Patches come before the words, and attend to each other alone.
    inputs = [tokens[:, :4] for tokens in inputs]
    expected = expected_rollout(
        blocks, inputs, rows_of("average", 4, None, None), (2, 2)
    )
    np.testing.assert_allclose(attention_rollout(limoe, pixels), expected, rtol=2e-4)

    image = {**IMAGE, **MOE, "num_selected_experts": 1, "class_token": False}
    siglip = clip(image=image, image_pooling="map")
    tower = with_weights(siglip).tower_backbone("image")
    *inputs, outputs = traced(tower, pixels)
    pooler = siglip.get_layer("image").get_layer("pooler")
    blocks = [tower.get_layer(name) for name in tower.block_names]
    expected = expected_rollout(
        blocks, inputs, rows_of("map", 4, pooler, outputs), (2, 2)
    )
    np.testing.assert_allclose(attention_rollout(siglip, pixels), expected, rtol=2e-4)
