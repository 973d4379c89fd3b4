"""MLP-Mixer's mixing of tokens.

Axes: B batch, N tokens, D hidden, H mlp.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.layers.mlp import MLP
from keras_moe.ops.cost import Cost


@keras.saving.register_keras_serializable("keras_moe")
class TokenMLP(MLP):
    """An MLP across the tokens, the same for each of the D channels.

    The number of tokens is an axis of its weights, which serve images of one size.

    Args:
        mlp_dim: H, the hidden size.
        activation: activation between the layers, `"gelu_tanh"` as in the JAX models,
            or any that Keras knows.
        dropout: dropout rate after each of the two layers.
        seed: seed of the dropout.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (B, N, D).

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if an argument is out of range, or the number of tokens is unknown.

    Reference:
        *MLP-Mixer: An all-MLP Architecture for Vision*, equation 1 (the first line).

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import TokenMLP
    >>> tuple(TokenMLP(mlp_dim=16)(np.ones((1, 4, 8), "float32")).shape)
    (1, 4, 8)
    """

    def build(self, input_shape):
        self.num_tokens = known_num_tokens(input_shape)
        super().build((input_shape[0], input_shape[2], input_shape[1]))

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        check_num_tokens(tokens, self.num_tokens)
        x = ops.transpose(tokens, (0, 2, 1))
        return ops.transpose(super().call(x, training=training), (0, 2, 1))

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens, dim).
        """
        return super().weight_shapes(shape[::-1])

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        num_tokens, dim = shape
        flops = 4 * num_tokens * dim * self.mlp_dim
        return Cost.all_active(self.weight_shapes(shape), flops)


def known_num_tokens(input_shape: tuple) -> int:
    """N, if it is known: a layer across tokens has weights of this size."""
    if len(input_shape) != 3 or input_shape[1] is None:
        raise ValueError(
            "Expected tokens of shape (batch, tokens, dim) with a known number "
            f"of tokens; received: shape={tuple(input_shape)}"
        )
    return input_shape[1]


def check_num_tokens(tokens: Any, num_tokens: int) -> None:
    """Refuses another number of tokens."""
    if tokens.shape[1] != num_tokens:
        raise ValueError(
            f"Expected {num_tokens} tokens, for which the layer was built; "
            f"received: shape={tuple(tokens.shape)}"
        )
