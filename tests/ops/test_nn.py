"""Attention, GELU, dense products and standardisation against plain `keras.ops`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import _nn
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs

DTYPES = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
EXTREMES = (0.0, 1e-30, 5.0, -5.0, 30.0, -30.0, 1e18, -1e18, np.inf, np.nan)


GENERATOR = np.random.default_rng(0)
X = (3.0 + GENERATOR.normal(size=(4, 3, 5))).astype("float32")
WEIGHTS = GENERATOR.normal(size=(3, 4, 3, 5)).astype("float32")
MASK = GENERATOR.random((4, 3)) < 0.7
EPSILON = 1e-2


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def assert_equal(function, reference, dtype, *arrays):
    """Outputs and the gradients in all arrays are the reference's."""

    def results(function):
        def loss(*tensors):
            outputs = function(*(ops.cast(x, dtype) for x in tensors))
            assert keras.backend.standardize_dtype(outputs.dtype) == dtype
            outputs = ops.cast(outputs, "float32")
            return ops.mean(ops.sin(outputs)), (outputs,)

        gradients, outputs = gradient_and_outputs(loss, *arrays)
        return [*outputs, *(len(outputs[0]) * x for x in gradients)]

    tolerance = DTYPES[dtype]
    for actual, expected in zip(results(function), results(reference)):
        scale = max(1.0, np.abs(expected).max(initial=0.0))
        assert_close(actual, expected, 0, tolerance * scale)


@pytest.mark.every_backend
@each_dtype
def test_gelu_is_keras_own(dtype):
    assert_equal(_nn.gelu_tanh, _nn.gelu_tanh_reference, dtype, 3 * normal(20, 30))
    assert_equal(_nn.gelu_tanh, _nn.gelu_tanh_reference, dtype, normal(0, 30))


@pytest.mark.every_backend
def test_gelu_of_extreme_inputs():
    x = np.array(EXTREMES, "float32")
    outputs = (
        ops.convert_to_numpy(f(x)) for f in (_nn.gelu_tanh, _nn.gelu_tanh_reference)
    )
    assert_close(*outputs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.every_backend
@each_dtype
@pytest.mark.parametrize(("inputs", "kernel", "axes"), [
    ((2, 3, 4), (4, 5), 1),
    ((2, 3, 4), (4, 2, 3), 1),
    ((2, 3, 2, 2), (2, 2, 5), 2),
    ((0, 3, 4), (4, 5), 1),
])  # fmt: skip
def test_linear_is_a_product_and_a_sum(inputs, kernel, axes, dtype):
    arrays = normal(*inputs), normal(*kernel), normal(*kernel[axes:])
    assert_equal(
        lambda *tensors: _nn.linear(*tensors, axes),
        lambda *tensors: _nn.linear_reference(*tensors, axes),
        dtype,
        *arrays,
    )


@pytest.mark.every_backend
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_keras_own(masked, dtype, monkeypatch):
    if keras.backend.backend() == "jax":
        # As on TPUs, where it is for bfloat16.
        kernel = "keras_moe.ops._nn.is_bfloat16_on_tpus"
        monkeypatch.setattr(kernel, lambda query: True)
    query, key, value = normal(2, 5, 2, 4), normal(2, 6, 2, 4), normal(2, 6, 2, 4) + 1
    # The first query has no key to attend to.
    mask = np.random.default_rng(0).random((2, 1, 5, 6)) < 0.5
    mask[0, 0, 0] = False
    mask = keras.ops.convert_to_tensor(mask) if masked else None
    assert_equal(
        lambda *tensors: _nn.attend(*tensors, 0.5, mask),
        lambda *tensors: _nn.attend_reference(*tensors, 0.5, mask),
        dtype,
        *(query, key, value),
    )


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a kernel of JAX")
def test_attention_has_the_form_of_its_devices(monkeypatch):
    import jax

    from keras_moe.ops._nn import has_float16_attention, has_own_attention

    query = keras.ops.zeros((1, 2, 1, 4), "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert has_own_attention(query)
    assert not has_own_attention(keras.ops.cast(query, "float32"))
    assert not has_float16_attention()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not has_own_attention(query)
    assert has_float16_attention()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with keras.device("cpu:0"):
        assert not has_own_attention(query)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="a kernel for PyTorch")
def test_gelu_has_second_gradients_and_batches():
    import torch

    x = torch.tensor(normal(6), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(_nn.gelu_tanh, (x,))
    slopes = torch.func.vmap(torch.func.grad(_nn.gelu_tanh))(x.detach())
    (expected,) = torch.autograd.grad(_nn.gelu_tanh_reference(x).sum(), x)
    torch.testing.assert_close(slopes, expected)
    _, tangents = torch.func.jvp(_nn.gelu_tanh, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangents, expected)


def standardized(x, axes, mask=None):
    part = 1.0 if mask is None else ops.cast(mask, "float32")[..., None]
    count = ops.sum(part * ops.ones_like(x), axes, keepdims=True)
    mean = ops.sum(part * x, axes, keepdims=True) / count
    centred = x - mean
    variance = ops.sum(part * centred * centred, axes, keepdims=True) / count
    return centred / ops.sqrt(variance + EPSILON), mean, variance


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("axes", "mask"), [((0, 1), None), ((-1,), None), ((0, 1), MASK)]
)
def test_standardize(axes, mask):
    """All outputs have a part in the loss, padded rows too."""

    def loss(function):
        def run(x):
            outputs = list(function(x))
            terms = (
                ops.sum(ops.multiply(ops.sin(y), w)) for y, w in zip(outputs, WEIGHTS)
            )
            return sum(terms), outputs

        return run

    actual = gradient_and_outputs(
        loss(lambda x: _nn.standardize(x, axes, EPSILON, mask)), X
    )
    expected = gradient_and_outputs(loss(lambda x: standardized(x, axes, mask)), X)
    assert_close(actual, expected, 0.0001, 1e-05)


def test_standardize_nothing_and_nan_in_the_padding():
    x = np.where(MASK[..., None], X, np.nan)
    y, mean, _ = _nn.standardize(x, (0, 1), EPSILON, MASK)
    expected, expected_mean, _ = _nn.standardize(X, (0, 1), EPSILON, MASK)
    for one, other in ((y, expected), (mean, expected_mean)):
        one, other = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
        rows = MASK if one.shape == X.shape else ...
        assert_same(one[rows], other[rows])
    for empty, mask in ((X[:0], None), (X, np.zeros_like(MASK))):
        outputs = _nn.standardize(empty, (0, 1), EPSILON, mask)
        shapes = [tuple(value.shape) for value in outputs]
        assert shapes == [empty.shape, (1, 1, 5), (1, 1, 5)]
