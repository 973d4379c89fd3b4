"""Attention: masks, grouped queries and the cache."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models
from keras_moe.layers import (
    Attention,
    CausalMask,
    RegisterTokens,
    RotaryEmbedding2D,
    TokenPooling,
)
from tests.calls import compiled
from tests.compare import assert_close, assert_same
from tests.refusals import refuses

DOCUMENTS = np.array([[1, 1, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1]], "int32")


def attention(**kwargs):
    options = {
        "num_heads": 4, "key_dim": 2, "num_key_value_heads": 2, "use_bias": False,
        "seed": 4, "query_key_norm": "layer", "query_key_norm_bias": True,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    return Attention(**{**options, **kwargs})


def tokens(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 6, 8)).astype("float32")


@pytest.mark.every_backend
def test_documents_and_padding_are_apart():
    mask, positions = CausalMask()(DOCUMENTS)
    row, column = np.arange(6)[:, None], np.arange(6)
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (DOCUMENTS[:, None] > 0)
    expected = (same & (row >= column)) | (row == column)
    assert_same(mask, expected)
    assert_same(positions, [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]])
    later, at = CausalMask()(DOCUMENTS, start=3, num_queries=2)
    assert_same(later, expected[:, 3:5])
    assert_same(at, ops.convert_to_numpy(positions)[:, 3:5])


@pytest.mark.every_backend
def test_groups_share_their_keys():
    """The same as attention whose keys and values are repeated by hand."""
    plain = {"query_key_norm": None, "query_key_norm_bias": False}
    grouped, full = attention(**plain), attention(num_key_value_heads=None, **plain)
    mask, positions = CausalMask()(DOCUMENTS)
    for layer in (grouped, full):
        layer.build((2, 6, 8))
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        kernel = ops.convert_to_numpy(getattr(grouped, name).kernel)
        if name in ("key_dense", "value_dense"):
            kernel = np.repeat(kernel, 2, axis=1)
        getattr(full, name).kernel.assign(kernel)
    arguments = {"mask": mask, "positions": positions}
    received = grouped(tokens(), **arguments)
    assert_close(received, full(tokens(), **arguments), 1e-5, 1e-6)
    # Two heads by hand.
    x = tokens()
    query, key, value = (
        np.einsum("bnd,dhk->bnhk", x, ops.convert_to_numpy(dense.kernel))
        for dense in (full.query_dense, full.key_dense, full.value_dense)
    )
    scores = np.einsum("bnhk,bmhk->bhnm", query, key) / np.sqrt(2)
    scores = np.where(ops.convert_to_numpy(mask)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("bhnm,bmhk->bnhk", weights, value)
    kernel = ops.convert_to_numpy(full.output_dense.kernel)
    assert_close(received, np.einsum("bnhk,hkd->bnd", mixed, kernel), 1e-4, 1e-5)


@pytest.mark.every_backend
def test_the_cache_gives_what_the_whole_sequence_gives():
    # Of the mask's pairs, all are causal.
    layer = attention(use_bias=True, causal=True)
    layer.build((2, 6, 8))

    @compiled
    def step(x, cache=None, start=0):
        mask, positions = CausalMask()(DOCUMENTS, start=start, num_queries=x.shape[1])
        arguments = {} if cache is None else {"cache": cache, "start": start}
        return layer(x, mask=mask, positions=positions, **arguments)

    whole = ops.convert_to_numpy(step(tokens()))
    shape = layer.cache_shape(2, 6)
    cache, parts = (np.zeros(shape, "float32"), np.zeros(shape, "float32")), []
    for start, end in ((0, 3), (3, 4), (4, 6)):
        part, cache = step(tokens()[:, start:end], cache, start)
        parts.append(ops.convert_to_numpy(part))
    assert_close(np.concatenate(parts, axis=1), whole, 1e-5, 1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_policies_costs_and_config(policy):
    layer = attention(dropout=0.3, dtype=policy)
    mask, positions = CausalMask()(DOCUMENTS)
    arguments = {"mask": mask, "positions": positions}
    outputs = layer(tokens(), **arguments, training=True)
    assert (
        keras.backend.standardize_dtype(outputs.dtype)
        == keras.dtype_policies.get(policy).compute_dtype
    )
    assert np.isfinite(ops.convert_to_numpy(ops.cast(outputs, "float32"))).all()
    # Projections of 4 + 2 + 2 + 4 heads, and both products of all pairs.
    assert layer.cost((6, 8)).flops == 2 * 6 * 8 * 12 * 2 + 4 * 6 * 6 * 8
    config = json.loads(json.dumps(layer.get_config()))
    again = Attention.from_config(config)
    assert json.loads(json.dumps(again.get_config())) == config
    # Dropout drops.
    plain = ops.convert_to_numpy(ops.cast(layer(tokens(), **arguments), "float32"))
    dropped = ops.convert_to_numpy(ops.cast(outputs, "float32"))
    assert np.abs(plain - dropped).max() > 1e-3


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a kernel of JAX")
def test_tpus_have_a_kernel_for_it(monkeypatch):
    from keras_moe.ops import _nn
    from keras_moe.ops.kernels import _tpus_jax

    mask, positions = CausalMask()(DOCUMENTS)
    full = attention(num_key_value_heads=None, dtype="mixed_bfloat16", dropout=0.5)
    arguments, called = {"mask": mask, "positions": positions}, []
    expected = ops.cast(full(tokens(), **arguments), "float32")
    attend = _tpus_jax.attend
    monkeypatch.setattr(_nn, "is_bfloat16_on_tpus", lambda query: True)
    monkeypatch.setattr(
        _tpus_jax, "attend", lambda *args: called.append(1) or attend(*args)
    )
    assert_close(
        ops.cast(full(tokens(), **arguments), "float32"), expected, 2**-6, 2**-6
    )
    assert called == [1]
    # It has no dropout, and would copy the keys that queries share.
    full(tokens(), **arguments, training=True)
    attention(dtype="mixed_bfloat16")(tokens(), **arguments)
    assert called == [1]


@pytest.mark.every_backend
def test_a_sink_scales_what_a_head_says():
    """By sigmoid(logsumexp of the logits - sink), as SigLino computes it."""
    options = {"query_key_norm": "plain_rms", "query_key_norm_bias": False}
    plain, layer = attention(**options), attention(sinks=True, **options)
    for each in (plain, layer):
        each.build((2, 6, 8))
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        getattr(layer, name).kernel.assign(getattr(plain, name).kernel)
    x, mask = tokens(), np.arange(12).reshape(2, 6) < 10
    layer.sink_logits.assign([-1e9] * 4)
    assert_close(layer(x, mask=mask), plain(x, mask=mask), 1e-5, 1e-6)
    sinks = np.array([-1.0, 0.0, 1.0, 2.0], "float32")
    layer.sink_logits.assign(sinks)

    def numpy(dense):
        return np.einsum("bnd,dhk->bnhk", x, ops.convert_to_numpy(dense.kernel))

    def unit(x):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True))

    query, key = unit(numpy(layer.query_dense)), unit(numpy(layer.key_dense))
    key, value = (np.repeat(z, 2, axis=2) for z in (key, numpy(layer.value_dense)))
    logits = np.einsum("bnhk,bmhk->bhnm", query, key) / 2**0.5
    logits = np.where(mask[:, None, None], logits, -np.inf)
    weights = np.exp(logits)
    total = weights.sum(axis=-1)
    heads = np.einsum("bhnm,bmhk->bhnk", weights / total[..., None], value)
    heads *= 1 / (1 + np.exp(sinks[:, None] - np.log(total)))[..., None]
    kernel = ops.convert_to_numpy(layer.output_dense.kernel)
    expected = np.einsum("bhnk,hkd->bnd", heads, kernel)
    assert_close(layer(x, mask=mask), expected, 1e-4, 1e-5)


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", ["axial", "golden"])
def test_rotated_products_depend_on_distances(kind):
    """Of one vector at all places: a product is that of any pair as far apart."""
    layer = RotaryEmbedding2D((3, 4), kind, base=7.0)
    vector = np.random.default_rng(0).normal(size=(1, 1, 2, 8)).astype("float32")
    x = np.repeat(vector, 3 + 12, axis=1)
    rotated = ops.convert_to_numpy(layer(x))
    assert_same(rotated[:, :3], x[:, :3])
    norms = np.linalg.norm(rotated, axis=-1)
    assert_close(norms, np.repeat(norms[:, :1], 15, axis=1), 1e-5)
    patches = rotated[0, 3:].reshape(3, 4, 2, 8)
    products = np.einsum("rchk,sdhk->rcsdh", patches, patches)
    for down, across in ((0, 1), (1, 0), (1, 2), (2, 1)):
        pairs = [
            products[r, c, r + down, c + across]
            for r in range(3 - down)
            for c in range(4 - across)
        ]
        assert_close(np.stack(pairs), np.repeat(pairs[:1], len(pairs), 0), 1e-4, 1e-5)
    assert np.abs(products[0, 0, 0, 1] - products[0, 0, 0, 0]).max() > 1e-3
    again = RotaryEmbedding2D.from_config(json.loads(json.dumps(layer.get_config())))
    assert_same(again(x), rotated)


def test_axial_angles_by_hand():
    """2 x 1 patches at y = -1/2 and 1/2 and x = 0, frequencies 1 and 1/10 of each."""
    x = np.zeros((1, 2, 1, 8), "float32")
    x[..., :4] = 1.0
    rotated = ops.convert_to_numpy(RotaryEmbedding2D((2, 1), base=100.0)(x))[0, :, 0]
    angles = np.array([[-np.pi, -np.pi / 10, 0, 0], [np.pi, np.pi / 10, 0, 0]])
    assert_close(rotated[:, :4], np.cos(angles), atol=1e-6)
    assert_close(rotated[:, 4:], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: RotaryEmbedding2D((2, 2), "spiral"), "kind='spiral'"),
    (lambda: RotaryEmbedding2D((2, 2))(np.ones((1, 4, 1, 6), "f")), "key_dim=6"),
    (lambda: RegisterTokens(2, index=5)(tokens()[:, :3]), "tokens=3"),
    (lambda: TokenPooling("average", 6)(tokens()), "tokens=6"),
    (
        lambda: models.ViTBackbone(
            num_heads=4, num_key_value_heads=2, position_embedding="golden_2d"
        ),
        "num_key_value_heads=2",
    ),
])  # fmt: skip
def test_bad_options(make, message):
    refuses(message, make)
