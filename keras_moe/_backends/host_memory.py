"""Tensors that share memory with NumPy arrays, so that large weights exist once.

Backends copy arrays unless these are aligned and owned by nothing else. It can go when
Keras loads weights without a copy.
"""

import math
from typing import TYPE_CHECKING, cast

import keras
import numpy as np
from numpy.typing import DTypeLike

from keras_moe._types import Tensor

if TYPE_CHECKING:
    import torch

# Bytes; XLA and TensorFlow copy arrays with another alignment.
_ALIGNMENT = 64


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Zeros that take no memory until they are written."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, "uint8")
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def holds_values() -> bool:
    """Whether a new tensor is made at once, from values in the host's memory."""
    if keras.backend.backend() == "torch":
        return _like("float32").device.type != "meta"
    if keras.backend.backend() != "jax" or not keras.distribution.distribution():
        return True
    import jax.core

    # JAX traces how a weight is made that is split over devices.
    return not isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def to_tensor(values: np.ndarray) -> Tensor:
    """A tensor of values that must not change any more; not a copy on CPUs."""
    if keras.backend.backend() == "jax":
        import jax

        # `jax.numpy.asarray` compiles a copy for each shape.
        return jax.device_put(values)
    if keras.backend.backend() == "tensorflow":
        # TensorFlow copies arrays, but not what converts itself to one.
        return keras.ops.convert_to_tensor(_Given(values))
    import torch

    return torch.from_numpy(values)


def lazy_zeros(shape: tuple[int, ...], dtype: str) -> Tensor | None:
    """A tensor of zeros that takes no memory on CPUs until it is written."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        like = _like(dtype)
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        memory = zeros((math.prod(shape) * like.element_size(),), "uint8")
        return torch.from_numpy(memory).view(like.dtype).view(shape)
    if backend == "tensorflow":
        import tensorflow as tf

        if not tf.executing_eagerly():
            return None
        return to_tensor(zeros(shape, tf.as_dtype(dtype).as_numpy_dtype))
    if keras.distribution.distribution() is not None:
        return None
    import jax

    return to_tensor(zeros(shape, jax.numpy.dtype(dtype)))


def memory_of(variable: keras.Variable) -> np.ndarray | None:
    """The memory of a weight, to be written to; None if it is not on the host."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    value = variable.value.detach()
    has_memory = value.device.type == "cpu" and value.is_contiguous()
    return value.numpy() if has_memory and value.dtype != torch.bfloat16 else None


def _like(dtype) -> "torch.Tensor":
    """A tensor of PyTorch on Keras's device, in PyTorch's dtype."""
    return cast("torch.Tensor", keras.ops.zeros((0,), dtype))


class _Given:
    """An object that converts to an array."""

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return self._values if dtype is None else self._values.astype(dtype, copy=False)
