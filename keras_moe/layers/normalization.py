"""Layer normalisation with a closed-form gradient, and RMS normalisation."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_bool, check_one_of, check_positive
from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer
from keras_moe.ops._nn import is_bfloat16_on_tpus
from keras_moe.ops._primitives import custom_gradient

NORMS = ("layer", "rms", "plain_rms")


def _moments(x, once):
    """The mean and variance of (..., D), as (..., 1); `once` reads the tokens once."""
    mean = ops.mean(x, axis=-1, keepdims=True)
    if once:
        # What float32 loses here is little beside the rounding of bfloat16 tokens.
        square = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return mean, ops.maximum(square - ops.square(mean), 0.0)
    # The extra axis keeps XLA from writing x - mean to memory for its two readers:
    # it recomputes differences of different shapes.
    rows = ops.expand_dims(x, -2) - ops.expand_dims(mean, -2)
    return mean, ops.mean(ops.square(rows), axis=-1)


def _normalize(x, gamma, beta, epsilon, once=False):
    """Layer normalisation of float32 (..., D) with a custom gradient."""

    def forward(x, gamma, beta):
        mean, variance = _moments(x, once)
        scale = ops.rsqrt(variance + epsilon)
        normed = (x - mean) * scale
        return normed * gamma + beta, (normed, scale, gamma)

    def backward(residuals, upstream):
        # dx = s (g - mean(g) - y mean(g y)) with g = gamma dy, s = 1 / sqrt(var + eps).
        normed, scale, gamma = residuals
        inner = upstream * gamma
        mean = ops.mean(inner, axis=-1, keepdims=True)
        along = ops.mean(inner * normed, axis=-1, keepdims=True)
        leading = tuple(range(len(upstream.shape) - 1))
        return (
            scale * (inner - mean - normed * along),
            ops.sum(upstream * normed, axis=leading),
            ops.sum(upstream, axis=leading),
        )

    return custom_gradient(forward, backward, x, gamma, beta)


class _Norm(Layer):
    def __init__(self, epsilon: float = 1e-6, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = check_positive("epsilon", epsilon)
        # Half-precision inputs are cast in `call`.
        self.autocast = False
        self.supports_masking = True


@keras.saving.register_keras_serializable("keras_moe")
class LayerNorm(_Norm):
    """Layer normalisation over the last axis, in float32 under every dtype policy.

    The closed-form gradient keeps XLA on CPU from recomputing the gradients of all
    later norms, as it does for `keras.layers.LayerNormalization`.

    Args:
        epsilon: added to the variance; 1e-6 in ViTs.
        center: whether there is a learned offset, `beta`.
        **kwargs: arguments of `keras.layers.Layer`.

    Example:

    >>> from keras_moe.layers import LayerNorm
    >>> x = LayerNorm()(np.array([[1.0, 3.0]], "float32"))
    >>> [round(float(value), 3) for value in x[0]]
    [-1.0, 1.0]
    """

    def __init__(self, epsilon: float = 1e-6, center: bool = True, **kwargs):
        super().__init__(epsilon, **kwargs)
        self.center = center

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(
            name="gamma", shape=shape, initializer="ones", autocast=False
        )
        self.beta = None
        if self.center:
            self.beta = self.add_weight(
                name="beta", shape=shape, initializer="zeros", autocast=False
            )

    def call(self, inputs: Tensor) -> Tensor:
        if keras.backend.backend() == "torch":
            outputs = ops.layer_normalization(
                inputs, self.gamma, self.beta, axis=-1, epsilon=self.epsilon
            )
            return ops.cast(outputs, self.compute_dtype)
        gamma = ops.cast(self.gamma, "float32")
        beta = ops.cast(self.beta, "float32") if self.center else ops.zeros_like(gamma)
        x, once = ops.cast(inputs, "float32"), is_bfloat16_on_tpus(inputs)
        outputs = _normalize(x, gamma, beta, self.epsilon, once)
        return ops.cast(outputs, self.compute_dtype)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        names = ("gamma", "beta") if self.center else ("gamma",)
        return dict.fromkeys(names, (shape[-1],))


@keras.saving.register_keras_serializable("keras_moe")
class RMSNorm(_Norm):
    """Root mean square normalisation over the last axis, in float32 under every policy.

    Args:
        epsilon: added to the mean square; 1e-6 in LLaMA.
        has_scale: whether each channel has a learned factor.
        **kwargs: arguments of `keras.layers.Layer`.

    Reference: *Root Mean Square Layer Normalization*.

    Example:

    >>> from keras_moe.layers import RMSNorm
    >>> x = RMSNorm()(np.array([[3.0, 4.0, 0.0, 0.0]], "float32"))
    >>> [round(float(value), 3) for value in x[0]]
    [1.2, 1.6, 0.0, 0.0]
    """

    def __init__(self, epsilon: float = 1e-6, has_scale: bool = True, **kwargs):
        super().__init__(epsilon, **kwargs)
        self.has_scale = check_bool("has_scale", has_scale)

    def build(self, input_shape):
        self.scale = None
        if self.has_scale:
            shape = (input_shape[-1],)
            self.scale = self.add_weight(
                name="scale", shape=shape, initializer="ones", autocast=False
            )

    def call(self, inputs: Tensor) -> Tensor:
        scale = None if self.scale is None else ops.cast(self.scale, "float32")
        outputs = ops.rms_normalization(
            ops.cast(inputs, "float32"), scale, axis=-1, epsilon=self.epsilon
        )
        return ops.cast(outputs, self.compute_dtype)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"scale": (shape[-1],)} if self.has_scale else {}


def norm_layer(
    norm: str, epsilon: float, use_bias: bool = True, **kwargs: Any
) -> LayerNorm | RMSNorm:
    """Creates a norm by name; `use_bias` is for layer norms."""
    check_one_of("norm", norm, NORMS)
    if norm == "plain_rms":
        # PyTorch's default, which SigLino relies on.
        epsilon = float(np.finfo("float32").eps)
        return RMSNorm(epsilon, has_scale=False, **kwargs)
    if norm == "rms":
        return RMSNorm(epsilon, **kwargs)
    return LayerNorm(epsilon, center=use_bias, **kwargs)
