"""Gradients and compiled functions, spelled the same on every backend."""

from collections.abc import Callable

import keras
import numpy as np


def gradient(fn: Callable, *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the gradient of a scalar by each array, zero where it does not matter."""
    return gradient_and_outputs(lambda *tensors: (fn(*tensors), ()), *arrays)[0]


def gradient_and_outputs(
    fn: Callable, *arrays: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Like `gradient`, of a function that returns further tensors: one program."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
        argnums = tuple(range(len(tensors)))
        grads, outputs = jax.jit(jax.grad(fn, argnums=argnums, has_aux=True))(*tensors)
    elif backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(array) for array in arrays]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value, outputs = fn(*tensors)
        grads = tape.gradient(value, tensors)
    else:
        import torch

        tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
        value, outputs = fn(*tensors)
        grads = torch.autograd.grad(value, tensors, allow_unused=True)
    gradients = [
        np.zeros_like(array) if grad is None else keras.ops.convert_to_numpy(grad)
        for grad, array in zip(grads, arrays)
    ]
    return gradients, [keras.ops.convert_to_numpy(output) for output in outputs]


def compiled(fn: Callable) -> Callable:
    """Returns the function as the backend's training loop would run it."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(fn)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(fn)
    return fn


def one_program(fn: Callable) -> Callable:
    """Compiles on JAX alone, which would compile each op for each shape."""
    return compiled(fn) if keras.backend.backend() == "jax" else fn
