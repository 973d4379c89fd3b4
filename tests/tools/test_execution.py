"""Compiled forward passes, against the layer's own call."""

import keras
import numpy as np
import pytest

from tools.benchmark.execution import forward, wait


class TwoOutputs(keras.layers.Layer):
    """A product, beside the number of its rows."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), initializer="ones")

    def call(self, x, training=None):
        product = keras.ops.matmul(x, self.kernel)
        return product * (2.0 if training else 1.0), keras.ops.shape(x)[0]


@pytest.mark.parametrize("training", [False, True])
def test_the_forward_pass_is_the_layers(training):
    # Sums of small integers are exact.
    inputs = np.arange(12, dtype="float32").reshape(3, 4)
    layer = TwoOutputs()
    layer.build(inputs.shape)
    expected, _ = layer(inputs, training=training)
    run = forward(layer, inputs, training)
    for _ in range(2):
        result = run()
        wait(result)
        result = keras.ops.convert_to_numpy(result)
        np.testing.assert_array_equal(result, keras.ops.convert_to_numpy(expected))
