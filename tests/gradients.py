"""Gradients and compiled functions, spelled the same on every backend."""

from collections.abc import Callable

import keras
import numpy as np


def gradient(fn: Callable, *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the gradient of a scalar function with respect to each array.

    An array that the result does not depend on has gradient zero.

    Args:
        fn: takes one tensor per array and returns a scalar tensor.
        *arrays: where the gradient is taken.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
        argnums = tuple(range(len(tensors)))
        found = jax.jit(jax.grad(fn, argnums=argnums))(*tensors)
    elif backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(array) for array in arrays]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = fn(*tensors)
        found = tape.gradient(value, tensors)
    else:
        import torch

        tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
        found = torch.autograd.grad(fn(*tensors), tensors, allow_unused=True)
    return [
        np.zeros_like(array) if grad is None else keras.ops.convert_to_numpy(grad)
        for grad, array in zip(found, arrays)
    ]


def compiled(fn: Callable) -> Callable:
    """Returns the function as the backend's training loop would run it.

    PyTorch runs it as it is: Keras does not compile there by default.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(fn)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(fn)
    return fn


def one_program(fn: Callable) -> Callable:
    """Compiles on JAX, to be quick there: op by op, every new shape is compiled.

    Elsewhere the function stays as it is.
    """
    return compiled(fn) if keras.backend.backend() == "jax" else fn
