"""Calls of a layer by the layer that owns it."""

from typing import Any

import keras
from keras import ops

from keras_moe.compat import (
    AutocastScope,
    get_autocast_scope,
    get_keras_mask,
    hands_on,
)


def inner_call(layer: keras.layers.Layer, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`layer(x, ...)`, without the bookkeeping that the owner's call has done."""
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
    """Whether a call of the layer is its method `call` in its dtype, and no more."""
    from keras_moe.ops.kernels import hooks_torch

    return (
        layer.built
        and ops.is_tensor(x)
        and get_keras_mask(x) is None
        and _takes(layer.input_spec, x)
        and type(layer).__call__ is keras.layers.Layer.__call__
        and type(layer).forward is keras.layers.Layer.forward
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and hands_on(layer, kwargs)
        and keras.distribution.distribution() is None
        and not hooks_torch.has_hooks(layer)
    )


def _takes(spec, x):
    """Whether an input has the sizes that a dense layer asks for."""
    # Keras has a sentence for what it refuses.
    return spec is None or (
        isinstance(spec, keras.InputSpec)
        and (spec.shape, spec.max_ndim, spec.dtype) == (None, None, None)
        and spec.ndim in (None, x.ndim)
        and (spec.min_ndim or 0) <= x.ndim
        and all(x.shape[axis] == size for axis, size in spec.axes.items())
    )


def _cast(layer, value):
    if not ops.is_tensor(value):
        return value
    return layer.dtype_policy.convert_input(value, True, layer.compute_dtype)
