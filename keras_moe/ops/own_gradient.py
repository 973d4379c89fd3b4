"""Gradients written by hand, which keep the tensors that they name and no others."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree


def with_own_gradient(forward: Callable, backward: Callable, *inputs: Any) -> Any:
    """The outputs of `forward`, with the gradient of `backward`.

    `keras.ops.custom_gradient` would keep all inputs on PyTorch, and an output that a
    gradient closes over until the garbage collector runs.
    """
    inputs = [ops.convert_to_tensor(x) for x in inputs]
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import own_gradient_torch

        return own_gradient_torch.with_own_gradient(forward, backward, *inputs)

    @ops.custom_gradient
    def function(*inputs):
        outputs, kept = forward(*inputs)
        specs = [(x.shape, x.dtype) for x in inputs]

        def gradient(*upstream):
            gradients = backward(kept, *tree.flatten(upstream))
            if keras.backend.backend() != "jax":
                return gradients
            # JAX takes no None.
            return tuple(
                ops.zeros(*spec) if x is None else x
                for x, spec in zip(gradients, specs, strict=True)
            )

        return outputs, gradient

    return function(*inputs)
