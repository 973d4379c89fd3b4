"""The token that gathers what the classifier reads.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.cost import Cost
from keras_moe.ops.initializers import FastInitializer


@keras.saving.register_keras_serializable("keras_moe")
class ClassToken(keras.layers.Layer):
    """Puts one learned token before the others.

    Args:
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (B, N, D).

    Output shape:
        (B, N + 1, D).

    Reference:
        *An Image is Worth 16x16 Words*, equation 1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import ClassToken
    >>> tuple(ClassToken()(np.ones((2, 4, 8), "float32")).shape)
    (2, 5, 8)
    """

    def build(self, input_shape):
        self.token = self.add_weight(
            name="token",
            shape=(1, 1, input_shape[-1]),
            initializer=FastInitializer("zeros"),
        )

    def call(self, tokens: Any) -> Any:
        batch = ops.shape(tokens)[0]
        token = ops.broadcast_to(self.token, (batch, 1, tokens.shape[-1]))
        return ops.concatenate([token, tokens], axis=1)

    def compute_output_shape(self, input_shape):
        batch, num_tokens, dim = input_shape
        return (batch, None if num_tokens is None else num_tokens + 1, dim)

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by name.

        Args:
            shape: (num_tokens, dim), without the class token.
        """
        return {"token": (1, 1, shape[-1])}

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim), without the class token.
        """
        return Cost.all_active(self.weight_shapes(shape))
