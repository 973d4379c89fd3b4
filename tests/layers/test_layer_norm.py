import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import LayerNorm
from keras_moe.ops._nn import is_bfloat16_on_tpus
from tests.compare import assert_close
from tests.gradients import gradient


def layers(epsilon=1e-3):
    generator = np.random.default_rng(0)
    mine = LayerNorm(epsilon)
    reference = keras.layers.LayerNormalization(epsilon=epsilon)
    for layer in (mine, reference):
        layer.build((None, None, 6))
    for name in ("gamma", "beta"):
        value = generator.normal(size=6).astype("float32")
        getattr(mine, name).assign(value)
        getattr(reference, name).assign(value)
    return mine, reference


@pytest.mark.every_backend
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
def test_values_and_gradients_are_those_of_keras(shape, mean):
    mine, reference = layers()
    generator = np.random.default_rng(1)
    x = (generator.normal(size=shape) + mean).astype("float32")
    weights = generator.normal(size=shape).astype("float32")
    # A mean of 100 costs two of float32's seven digits in either form.
    atol = 1e-5 * (1 + mean)
    assert_close(mine(x), reference(x), 1e-4, atol)
    grads = [
        gradient(lambda x, layer=layer: ops.sum(ops.multiply(layer(x), weights)), x)[0]
        for layer in (mine, reference)
    ]
    assert_close(*grads, rtol=1e-3, atol=atol)


@pytest.mark.every_backend
def test_bfloat16_tokens_are_read_once_on_tpus(monkeypatch):
    """With the same result, as far as bfloat16 goes, and not for other tokens."""
    mine, _ = layers()
    x = np.random.default_rng(1).normal(loc=3, size=(4, 6)).astype("float32")
    x = ops.convert_to_numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    weights = np.random.default_rng(2).normal(size=(4, 6)).astype("float32")
    found = []
    for once in (False, True):
        name = "keras_moe.layers.normalization.is_bfloat16_on_tpus"
        monkeypatch.setattr(name, lambda x, once=once: once)
        outputs = mine(x)
        slope = gradient(lambda x: ops.sum(ops.multiply(mine(x), weights)), x)[0]
        found.append((outputs, slope))
    for own, other in zip(*found):
        assert_close(own, other, 1e-4, 1e-5)
    monkeypatch.undo()
    assert not is_bfloat16_on_tpus(ops.ones(1, "bfloat16"))
