"""The product of a dense layer with its bias.

Axes: B leading axes of any number, D contracted axes, H outputs.
"""

from typing import Any

import keras
from keras import ops


def linear(inputs: Any, kernel: Any, bias: Any, axes: int = 1) -> Any:
    """`inputs @ kernel + bias` over the last axes of the inputs.

    On PyTorch it is one call, which adds the bias while it multiplies: outputs are
    not read and written once more. XLA and TensorFlow's compiler do so by themselves.
    """
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import linear_torch

        inputs, kernel, bias = map(ops.convert_to_tensor, (inputs, kernel, bias))
        if linear_torch.is_valid(inputs, kernel, bias):
            return linear_torch.linear(inputs, kernel, bias, axes)
    return linear_reference(inputs, kernel, bias, axes)


def linear_reference(inputs: Any, kernel: Any, bias: Any, axes: int = 1) -> Any:
    """`linear` in `keras.ops`: a product, then a sum."""
    if axes == 1 and len(kernel.shape) == 2:
        return ops.add(ops.matmul(inputs, kernel), bias)
    return ops.add(ops.tensordot(inputs, kernel, axes), bias)
