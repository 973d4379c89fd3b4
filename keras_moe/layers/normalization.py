"""Layer normalisation whose cost does not grow with the depth of the network."""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.cost import Cost
from keras_moe.ops.initializers import FastInitializer


def _normalize(x, gamma, beta, epsilon):
    """Layer normalisation of float32 (..., D) with its gradient in closed form."""

    @ops.custom_gradient
    def normalize(x, gamma, beta):
        mean = ops.mean(x, axis=-1, keepdims=True)
        # With one more axis, since XLA would write one difference of (..., D) to memory
        # for its two readers; it computes either of two shapes in passing.
        rows = ops.expand_dims(x, -2) - ops.expand_dims(mean, -2)
        variance = ops.mean(ops.square(rows), axis=-1)
        scale = ops.rsqrt(variance + epsilon)
        normed = (x - mean) * scale

        def gradient(upstream):
            inner = upstream * gamma
            mean = ops.mean(inner, axis=-1, keepdims=True)
            along = ops.mean(inner * normed, axis=-1, keepdims=True)
            leading = tuple(range(len(x.shape) - 1))
            return (
                scale * (inner - mean - normed * along),
                ops.sum(upstream * normed, axis=leading),
                ops.sum(upstream, axis=leading),
            )

        return normed * gamma + beta, gradient

    return normalize(x, gamma, beta)


@keras.saving.register_keras_serializable("keras_moe")
class LayerNorm(keras.layers.Layer):
    """Layer normalisation over the last axis, in float32 under every policy.

    XLA on CPU recomputes the chain of all later blocks' norm gradients inside every
    reduction that differentiation of `keras.layers.LayerNormalization` leaves, so
    the cost of a training step grows faster than the depth. Here the gradient is
    written out in closed form: a norm costs next to nothing at any depth. PyTorch
    has a fused kernel, which is used there.

    Args:
        epsilon: number added to the variance; ViTs use 1e-6.
        center: whether there is a learned offset, `beta`.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (..., D).

    Output shape:
        (..., D), in the layer's compute dtype.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import LayerNorm
    >>> x = LayerNorm()(np.array([[1.0, 3.0]], "float32"))
    >>> [round(float(value), 3) for value in x[0]]
    [-1.0, 1.0]
    """

    def __init__(self, epsilon: float = 1e-6, center: bool = True, **kwargs):
        if not epsilon > 0:
            raise ValueError(f"Expected epsilon > 0; received: epsilon={epsilon}")
        super().__init__(**kwargs)
        self.epsilon = epsilon
        self.center = center
        # Half-precision inputs are cast here, not at the door of the layer.
        self.autocast = False
        self.supports_masking = True

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(
            name="gamma",
            shape=shape,
            initializer=FastInitializer("ones"),
            autocast=False,
        )
        self.beta = None
        if self.center:
            self.beta = self.add_weight(
                name="beta",
                shape=shape,
                initializer=FastInitializer("zeros"),
                autocast=False,
            )

    def call(self, inputs: Any) -> Any:
        if keras.backend.backend() == "torch":
            outputs = ops.layer_normalization(
                inputs, self.gamma, self.beta, axis=-1, epsilon=self.epsilon
            )
            return ops.cast(outputs, self.compute_dtype)
        gamma = ops.cast(self.gamma, "float32")
        beta = ops.cast(self.beta, "float32") if self.center else ops.zeros_like(gamma)
        outputs = _normalize(ops.cast(inputs, "float32"), gamma, beta, self.epsilon)
        return ops.cast(outputs, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        names = ("gamma", "beta") if self.center else ("gamma",)
        return dict.fromkeys(names, (shape[-1],))

    def cost(self, shape: tuple[int, int]) -> Cost:
        return Cost.all_active(self.weight_shapes(shape))

    def get_config(self):
        config = super().get_config()
        config.update(epsilon=self.epsilon, center=self.center)
        return config
