"""Tests of calls of a layer by its owner: on PyTorch they are not Keras's."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import layers, routers
from keras_moe.layers._layer import inner_call
from tests.compare import assert_same
from tests.small_models import with_weights

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="other backends call the layer"
)
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")


@pytest.fixture
def calls(monkeypatch):
    """Names of the layers that went through Keras's call."""
    names, keras_call = [], keras.layers.Layer.__call__

    def call(layer, *args, **kwargs):
        names.append(layer.name)
        return keras_call(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.Layer, "__call__", call)
    return names


def dense(**kwargs):
    layer = keras.layers.Dense(5, name="dense", **kwargs)
    layer.build(X.shape)
    return with_weights(layer)


def blocks(**kwargs):
    """A dense block and one with experts, by name."""
    attention = {
        "num_heads": 2, "key_dim": 2, "query_key_norm": "layer", "dropout": 0.5,
    }  # fmt: skip
    router = routers.TokenChoiceRouter(2, noise_std=1.0, seed=1)
    experts = layers.MoE(router, layers.Experts(2, 8, dropout=0.5, seed=2), **kwargs)
    parts = {
        layers.Block: layers.MLP(8, dropout=0.5, seed=3, **kwargs),
        layers.MoEBlock: experts,
    }
    for cls, feed_forward in parts.items():
        mixer = layers.Attention(**attention, seed=4, **kwargs)
        block = cls(mixer, feed_forward, dropout=0.5, seed=5, name="block", **kwargs)
        block.build(X.shape)
        yield with_weights(block)


@pytest.mark.parametrize("training", [False, True])
def test_a_block_is_one_call_of_keras(training, calls):
    for block in blocks():
        calls.clear()
        block(ops.convert_to_tensor(X), training=training)
        assert [name.split("_")[0] for name in calls] == ["block"]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "float16", "float64"])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_are_those_of_keras_calls(dtype, training, calls, monkeypatch):
    results = {}
    for way in ("inner", "keras"):
        if way == "keras":
            monkeypatch.setattr("keras_moe.layers._layer._is_all", lambda *_: False)
        calls.clear()
        for number, block in enumerate(blocks(dtype=dtype)):
            outputs = block(ops.convert_to_tensor(X), training=training)
            results[way, number] = keras.tree.flatten(outputs)
        assert ("mixer_norm" in calls) == (way == "keras")
    for number in range(2):
        for inner, whole in zip(results["inner", number], results["keras", number]):
            assert inner.dtype == whole.dtype
            assert_same(
                *(ops.convert_to_numpy(ops.cast(x, "float64")) for x in (inner, whole))
            )


def test_everything_around_a_call_still_happens(calls):
    import torch

    x = ops.convert_to_tensor(X)

    def called(layer, x=x, **kwargs):
        calls.clear()
        inner_call(layer, x, **kwargs)
        return calls != []

    assert not called(dense())
    # An array, a layer that is not built, and one with a call of its own.
    assert called(dense(), X)
    assert called(keras.layers.Dense(2))
    own = type("Own", (layers.MLP,), {"__call__": lambda self, x: calls.append("own")})(
        4
    )
    own.build(X.shape)
    assert called(own)
    regularized = dense(activity_regularizer="l2")
    assert called(regularized)
    assert regularized.losses
    quantized = dense()
    quantized.quantize("int8")
    assert called(quantized)
    with keras.RematScope(mode="full"):
        assert called(dense())
    masked = ops.convert_to_tensor(X) + 0
    masked._keras_mask = ops.ones((2, 3), "bool")
    assert called(layers.LayerNorm(), masked)

    seen = []
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = dense()
        handle = getattr(layer, register)(lambda *_, name=register: seen.append(name))
        assert called(layer)
        handle.remove()
        assert not called(layer)
    compiled = dense()
    compiled.compile(backend="eager")
    assert called(compiled)
    forward = type("Forward", (layers.MLP,), {"forward": lambda self, x: x})(4)
    forward.build(X.shape)
    assert called(forward)

    layer = dense()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(module.name)
    )
    assert called(layer)
    handle.remove()
    assert seen == ["register_forward_hook", "register_forward_pre_hook", "dense"]


def test_a_layer_without_training_gets_none():
    class Half(keras.layers.Layer):
        def call(self, x):
            return x / 2

    for feed_forward in (Half(), keras.layers.LayerNormalization()):
        block = layers.Block(layers.Attention(2, 2), feed_forward)
        assert tuple(block(ops.convert_to_tensor(X), training=True).shape) == X.shape
