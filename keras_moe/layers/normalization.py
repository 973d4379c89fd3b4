"""Layer normalisation whose cost does not grow with the depth of the network."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_moe")
class LayerNorm(keras.layers.Layer):
    """Layer normalisation over the last axis, in float32 under every policy.

    `keras.layers.LayerNormalization` subtracts the mean before it squares. XLA on
    CPU then recomputes the chain of all later blocks' gradients inside every
    reduction, and a training step costs more than linearly in depth. With the
    square taken first, as Flax does, there is no such growth. PyTorch has a
    fused kernel, which is used there.

    Args:
        epsilon: added to the variance; ViTs use 1e-6.
        **kwargs: see `keras.layers.Layer`.

    Input shape:
        (..., D).

    Output shape:
        (..., D), in the layer's compute dtype.

    Raises:
        ValueError: if `epsilon` is not positive.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import LayerNorm
    >>> x = LayerNorm()(np.array([[1.0, 3.0]], "float32"))
    >>> [round(float(value), 3) for value in x[0]]
    [-1.0, 1.0]
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs):
        if not epsilon > 0:
            raise ValueError(f"Expected epsilon > 0; received: epsilon={epsilon}")
        super().__init__(**kwargs)
        self.epsilon = epsilon
        # Half-precision inputs are cast here, not at the door of the layer.
        self.autocast = False
        self.supports_masking = True

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(
            name="gamma", shape=shape, initializer="ones", autocast=False
        )
        self.beta = self.add_weight(
            name="beta", shape=shape, initializer="zeros", autocast=False
        )

    def call(self, inputs: Any) -> Any:
        if keras.backend.backend() == "torch":
            outputs = ops.layer_normalization(
                inputs, self.gamma, self.beta, axis=-1, epsilon=self.epsilon
            )
            return ops.cast(outputs, self.compute_dtype)
        x = ops.cast(inputs, "float32")
        mean = ops.mean(x, axis=-1, keepdims=True)
        mean_of_squares = ops.mean(ops.square(x), axis=-1, keepdims=True)
        # Rounding may leave a variance a little below zero.
        variance = ops.maximum(mean_of_squares - ops.square(mean), 0.0)
        scale = ops.rsqrt(variance + self.epsilon) * ops.cast(self.gamma, "float32")
        outputs = (x - mean) * scale + ops.cast(self.beta, "float32")
        return ops.cast(outputs, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}
