import keras
import numpy as np
import pytest

from keras_moe.ops.dropout import dropout, dropout_reference
from tests.gradients import gradient_and_outputs


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("shape", "rate", "dtype"),
    [
        ((2, 3, 70), 0.2, "float32"),
        ((1000,), 0.9, "bfloat16"),
        ((4, 5), 0.0, "float32"),
        ((0, 3), 0.5, "float32"),
        ((), 0.5, "float32"),
    ],
)
def test_dropout_is_keras_own(shape, rate, dtype):
    """Two draws in turn, of which a gradient has the same zeros, bit for bit."""
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    results = {}
    for function in (dropout, dropout_reference):
        seed = keras.random.SeedGenerator(3)

        def loss(x, function=function, seed=seed):
            x = keras.ops.cast(x, dtype)
            first, second = function(x, rate, seed), function(x, rate, seed)
            assert keras.backend.standardize_dtype(first.dtype) == dtype
            outputs = [keras.ops.cast(y, "float32") for y in (first, second)]
            return keras.ops.sum(keras.ops.square(outputs[0])), outputs

        gradients, outputs = gradient_and_outputs(loss, x)
        results[function] = *gradients, *outputs
    for actual, expected in zip(*results.values(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    if x.size > 100 and rate:
        _, first, second = results[dropout]
        assert 0 < np.mean(first == 0) < 1
        assert np.any(first != second)
