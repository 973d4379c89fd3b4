"""Activations by name, including some that Keras lacks."""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe._types import Activation, Config, Tensor
from keras_moe.ops import _nn
from keras_moe.ops.entmax import entmax


@keras.saving.register_keras_serializable("keras_moe")
def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, as in the JAX models (`"gelu"` is exact).

    Args:
        x: float tensor of any shape.

    Example:

    >>> from keras_moe.layers import gelu_tanh
    >>> float(gelu_tanh(np.zeros(1, "float32"))[0])
    0.0
    """
    return _nn.gelu_tanh(x)


@keras.saving.register_keras_serializable("keras_moe")
def quick_gelu(x: Tensor) -> Tensor:
    """OpenAI CLIP's approximation of GELU, `x * sigmoid(1.702 x)`.

    Args:
        x: float tensor of any shape.

    Example:

    >>> from keras_moe.layers import quick_gelu
    >>> float(quick_gelu(np.zeros(1, "float32"))[0])
    0.0
    """
    x = keras.ops.convert_to_tensor(x)
    return x * keras.ops.sigmoid(1.702 * x)


@keras.saving.register_keras_serializable("keras_moe")
def entmax15(x: Tensor) -> Tensor:
    """Entmax with alpha = 1.5, the activation of muMoE's gate."""
    return entmax(x, 1.5)


_NAMED = {
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "entmax": entmax15,
    "silu": _nn.silu,
}


def get(identifier: Activation) -> Callable:
    """Looks up an activation by name, here first and then in Keras."""
    if isinstance(identifier, str) and identifier in _NAMED:
        return _NAMED[identifier]
    try:
        activation = keras.activations.get(identifier)
        if activation is keras.activations.silu:
            return _nn.silu
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected the name of an activation, one of {tuple(_NAMED)} or of Keras, "
            f"or a function; received: activation={identifier!r}"
        ) from error
    if getattr(activation, "__name__", "") == "<lambda>":
        raise ValueError(
            "Expected a name, or a function under "
            "@keras.saving.register_keras_serializable; received: a lambda"
        )
    return activation


def serialize(activation: Callable) -> Any:
    """Returns the name or config from which `get` restores the activation."""
    for name, function in _NAMED.items():
        if activation is function:
            return name
    return keras.activations.serialize(activation)


def plain(activation: Activation | None) -> str | Config | None:
    """Converts an activation to its name or config; None stays None."""
    return None if activation is None else serialize(get(activation))
