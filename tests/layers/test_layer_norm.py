import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import LayerNorm
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


def test_gradients_of_scale_and_offset_by_hand():
    x = np.array([[1.0, 3.0], [2.0, 2.0]], "float32")
    layer = LayerNorm(1e-12)
    layer.build((None, 2))

    def loss(gamma, beta):
        with keras.StatelessScope([(layer.gamma, gamma), (layer.beta, beta)]):
            return ops.sum(
                ops.multiply(layer.call(x), np.array([1.0, 10.0], "float32"))
            )

    ones = np.ones(2, "float32")
    gamma, beta = gradient(loss, ones, 0 * ones)
    # The first row is normalised to (-1, 1), the second to (0, 0).
    assert_close(gamma, [-1, 10], 1e-5)
    assert_close(beta, [2, 20], 1e-5)
