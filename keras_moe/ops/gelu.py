"""GELU in its tanh form, which the JAX models use."""

from typing import Any

import keras
from keras import ops


def gelu_tanh(x: Any) -> Any:
    """`0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.

    PyTorch's kernel for the tanh takes two to four times that for the erf form on a
    CPU: there the same function is computed as `x sigmoid(2 u)`.

    Args:
        x: a float tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.

    Reference:
        *Gaussian Error Linear Units*, section 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.gelu import gelu_tanh
    >>> round(float(gelu_tanh(np.ones(1, "float32"))[0]), 4)
    0.8412
    """
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import gelu_torch

        x = ops.convert_to_tensor(x)
        if x.is_floating_point():
            return gelu_torch.gelu_tanh(x)
    return gelu_tanh_reference(x)


def gelu_tanh_reference(x: Any) -> Any:
    """`gelu_tanh` as Keras computes it."""
    return keras.activations.gelu(x, approximate=True)
