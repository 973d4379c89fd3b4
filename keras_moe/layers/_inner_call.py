"""Cheap calls of layers inside layers.

`keras.layers.Layer.__call__` costs about 60 us, which on PyTorch is a tenth of a small
model's forward pass. `inner_call` and `fused_bias` can go once Keras's call is cheap.
"""

import types
from typing import Any

import keras
from keras import ops

from keras_moe._compat import (
    AutocastScope,
    get_autocast_scope,
    get_keras_mask,
    has_hooks,
    passes_arguments,
)
from keras_moe.ops._nn import linear


def inner_call(layer: keras.layers.Layer, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`layer(x, ...)` without the bookkeeping already done by the outer call."""
    if keras.backend.backend() != "torch" or not _is_all(layer, x, kwargs):
        return layer(x, *args, **kwargs)
    if layer.autocast:
        x, *args = (_cast(layer, value) for value in (x, *args))
        kwargs = {name: _cast(layer, value) for name, value in kwargs.items()}
    # Mixed precision reads variables in the layer's dtype.
    if get_autocast_scope() is None and layer.compute_dtype == layer.variable_dtype:
        return layer.call(x, *args, **kwargs)
    with AutocastScope(layer.compute_dtype if layer.autocast else None):
        return layer.call(x, *args, **kwargs)


def _is_all(layer, x, kwargs):
    """Whether calling the layer amounts to calling `layer.call`."""
    return (
        layer.built
        and ops.is_tensor(x)
        and get_keras_mask(x) is None
        and type(layer).__call__ is keras.layers.Layer.__call__
        and type(layer).forward is keras.layers.Layer.forward
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and passes_arguments(layer, kwargs)
        and keras.distribution.distribution() is None
        and not has_hooks(layer)
    )


def _cast(layer, value):
    if not ops.is_tensor(value):
        return value
    return layer.dtype_policy.convert_input(value, True, layer.compute_dtype)


def dropped_out(dropout: keras.layers.Dropout, x: Any, training: bool | None) -> Any:
    """`dropout(x)`, skipping the call if the rate is 0."""
    if not dropout.rate:
        return x
    # `None` is resolved from the call context, which inner calls do not read.
    if training is None:
        return dropout(x)
    return inner_call(dropout, x, training=training)


def fused_bias(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Makes a dense layer compute `keras_moe.ops.linear` on PyTorch.

    Replaces the method, so that weight paths, LoRA and quantisation keep working.
    """
    if keras.backend.backend() == "torch":
        layer.call = types.MethodType(_call, layer)
    return layer


def _call(layer, inputs, training=None):
    kernel, bias = layer.kernel, layer.bias
    if bias is None:
        return type(layer).call(layer, inputs, training=training)
    x = linear(inputs, kernel, bias, len(kernel.shape) - len(bias.shape))
    return x if layer.activation is None else layer.activation(x)
