"""The ops of dense transformers against `keras.ops`: GELU, linear, attention."""

import keras
import numpy as np
import pytest

from keras_moe.ops.attention import attend, attend_reference
from keras_moe.ops.gelu import gelu_tanh, gelu_tanh_reference
from keras_moe.ops.linear import linear, linear_reference
from tests.gradients import gradient_and_outputs

DTYPES = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
EXTREMES = (0.0, 1e-30, 5.0, -5.0, 30.0, -30.0, 1e18, -1e18, np.inf, np.nan)


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def assert_equal(function, reference, dtype, *arrays):
    """Outputs and the gradients in all arrays are the reference's."""

    def results(function):
        def loss(*tensors):
            outputs = function(*(keras.ops.cast(x, dtype) for x in tensors))
            assert keras.backend.standardize_dtype(outputs.dtype) == dtype
            outputs = keras.ops.cast(outputs, "float32")
            return keras.ops.mean(keras.ops.sin(outputs)), (outputs,)

        gradients, outputs = gradient_and_outputs(loss, *arrays)
        return [*outputs, *(len(outputs[0]) * x for x in gradients)]

    tolerance = DTYPES[dtype]
    for actual, expected in zip(results(function), results(reference)):
        scale = max(1.0, np.abs(expected).max(initial=0.0))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.every_backend
@each_dtype
def test_gelu_is_keras_own(dtype):
    assert_equal(gelu_tanh, gelu_tanh_reference, dtype, 3 * normal(20, 30))
    assert_equal(gelu_tanh, gelu_tanh_reference, dtype, normal(0, 30))


@pytest.mark.every_backend
def test_gelu_of_extreme_inputs():
    x = np.array(EXTREMES, "float32")
    outputs = (
        keras.ops.convert_to_numpy(f(x)) for f in (gelu_tanh, gelu_tanh_reference)
    )
    np.testing.assert_allclose(*outputs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.every_backend
@each_dtype
@pytest.mark.parametrize(
    ("inputs", "kernel", "axes"),
    [
        ((2, 3, 4), (4, 5), 1),
        ((2, 3, 4), (4, 2, 3), 1),
        ((2, 3, 2, 2), (2, 2, 5), 2),
        ((0, 3, 4), (4, 5), 1),
    ],
)
def test_linear_is_a_product_and_a_sum(inputs, kernel, axes, dtype):
    arrays = normal(*inputs), normal(*kernel), normal(*kernel[axes:])
    assert_equal(
        lambda *tensors: linear(*tensors, axes),
        lambda *tensors: linear_reference(*tensors, axes),
        dtype,
        *arrays,
    )


@pytest.mark.every_backend
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_keras_own(masked, dtype):
    query, key, value = normal(2, 5, 2, 4), normal(2, 6, 2, 4), normal(2, 6, 2, 4) + 1
    # The first query has nobody to attend to.
    mask = np.random.default_rng(0).random((2, 1, 5, 6)) < 0.5
    mask[0, 0, 0] = False
    mask = keras.ops.convert_to_tensor(mask) if masked else None
    assert_equal(
        lambda *tensors: attend(*tensors, 0.5, mask),
        lambda *tensors: attend_reference(*tensors, 0.5, mask),
        dtype,
        *(query, key, value),
    )


@pytest.mark.backend_free
def test_gelu_has_second_gradients_and_batches():
    import torch

    x = torch.tensor(normal(6), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(gelu_tanh, (x,))
    slopes = torch.func.vmap(torch.func.grad(gelu_tanh))(x.detach())
    (expected,) = torch.autograd.grad(gelu_tanh_reference(x).sum(), x)
    torch.testing.assert_close(slopes, expected)
    _, tangents = torch.func.jvp(gelu_tanh, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangents, expected)
