"""Layers' arithmetic that `keras.ops` computes slowly, or keeps too much of, somewhere.

A function with a backend's kernel has a reference in plain `keras.ops` next to it.
"""

from typing import Any

import keras
from keras import ops

from keras_moe._types import Tensor
from keras_moe.ops._primitives import custom_gradient


def gelu_tanh(x: Tensor) -> Tensor:
    """`0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, the GELU of the JAX models.

    PyTorch's tanh kernel is slow on CPUs: there it is computed as `x sigmoid(2 u)`.
    """
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import _nn_torch

        x = ops.convert_to_tensor(x)
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
            return _nn_torch.gelu_tanh(x)
    return gelu_tanh_reference(x)


def gelu_tanh_reference(x: Tensor) -> Any:
    """`gelu_tanh` as Keras computes it."""
    return keras.activations.gelu(x, approximate=True)


def silu(x: Tensor) -> Any:
    """`x sigmoid(x)`; TensorFlow's own keeps every graph that it is traced in."""
    if keras.backend.backend() == "tensorflow":
        return x * ops.sigmoid(x)
    return keras.activations.silu(x)


def is_bfloat16_on_tpus(x: Tensor) -> bool:
    if keras.backend.backend() != "jax":
        return False
    from keras_moe._backends.jax import platform

    dtype = keras.backend.standardize_dtype(x.dtype)
    return dtype == "bfloat16" and platform() == "tpu"


def has_own_attention(query: Tensor) -> bool:
    """Whether `attend` has a kernel: on PyTorch, and in bfloat16 on TPUs."""
    return keras.backend.backend() == "torch" or is_bfloat16_on_tpus(query)


def has_float16_attention() -> bool:
    """Whether Keras's attention works in float16, which on JAX needs a GPU."""
    if keras.backend.backend() != "jax":
        return True
    from keras_moe._backends.jax import platform

    return platform() not in ("cpu", "tpu")


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """`softmax(scale * query key^T) value` per head: (B, N, h, d) from (B, M, h, d)."""
    # `torch.compile` cannot read Keras's form, which keeps more than needed on TPUs.
    if not has_own_attention(query):
        return attend_reference(query, key, value, scale, mask)
    query, key, value = map(ops.convert_to_tensor, (query, key, value))
    if keras.backend.backend() == "jax":
        from keras_moe.ops.kernels import _tpus_jax

        return _tpus_jax.attend(query, key, value, scale, mask)
    from keras_moe.ops.kernels import _nn_torch

    return _nn_torch.attend(query, key, value, scale, mask)


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """`attend` as Keras computes it."""
    return ops.dot_product_attention(query, key, value, mask=mask, scale=scale)


def linear(inputs: Tensor, kernel: Tensor, bias: Tensor, axes: int = 1) -> Tensor:
    """`inputs @ kernel + bias` over the last axes, in one call on PyTorch."""
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import _nn_torch

        inputs, kernel, bias = map(ops.convert_to_tensor, (inputs, kernel, bias))
        if _nn_torch.linear_is_valid(inputs, kernel, bias):
            return _nn_torch.linear(inputs, kernel, bias, axes)
    return linear_reference(inputs, kernel, bias, axes)


def linear_reference(
    inputs: Tensor, kernel: Tensor, bias: Tensor, axes: int = 1
) -> Tensor:
    """`linear` as a product and a sum."""
    if axes == 1 and len(kernel.shape) == 2:
        return ops.add(ops.matmul(inputs, kernel), bias)
    return ops.add(ops.tensordot(inputs, kernel, axes), bias)


def standardize(
    x: Tensor, axes: tuple[int, ...], epsilon: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`y = (x - mean) / sqrt(variance + epsilon)`, its mean and variance over axes."""

    def forward(x, *mask):
        mean = _mean(x, axes, *mask)
        # Squares of centred values: no difference of large numbers.
        centred = x - mean
        variance = _mean(centred * centred, axes, *mask)
        y = centred * ops.rsqrt(variance + epsilon)
        return (y, mean, variance), (y, variance, *mask)

    # With s = 1 / sqrt(variance + epsilon): dx = s (dy - mean(dy) - y mean(dy y)).
    def backward(residuals, upstream, mean_upstream, variance_upstream):
        y, variance, *mask = residuals
        scale = ops.rsqrt(variance + epsilon)
        # Rows without a part in the statistics depend on them all the same.
        total = ops.sum(upstream, axes, keepdims=True) - mean_upstream / scale
        along = ops.sum(upstream * y, axes, keepdims=True)
        along = along - 2.0 * variance_upstream / (scale * scale)
        count = _count(y, axes, *mask)
        change = total / count + y * (along / count)
        if mask:
            change = ops.where(mask[0] > 0, change, ops.zeros_like(change))
        return scale * (upstream - change), *(None for _ in mask)

    x = ops.convert_to_tensor(x)
    if mask is None:
        return custom_gradient(forward, backward, x)
    mask = ops.expand_dims(ops.cast(mask, x.dtype), -1)
    return custom_gradient(forward, backward, x, mask)


def _mean(x, axes, mask=None):
    if mask is None:
        return ops.mean(x, axes, keepdims=True)
    # A product would not do: padding may hold NaN.
    total = ops.sum(ops.where(mask > 0, x, ops.zeros_like(x)), axes, keepdims=True)
    return total / _count(x, axes, mask)


def _count(x, axes, mask=None):
    if mask is not None:
        return ops.maximum(ops.sum(mask, axes, keepdims=True), 1.0)
    size = 1
    for axis in axes:
        size = size * ops.shape(x)[axis]
    return ops.maximum(ops.cast(size, x.dtype), 1.0)
