"""Transformer encoder blocks, with a dense or a mixture-of-experts feed-forward.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import math
from typing import Any

import keras

from keras_moe.layers.mlp import check_dropout
from keras_moe.layers.nested import build_once, layer_argument
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops.checks import check_integer


@keras.saving.register_keras_serializable("keras_moe")
class EncoderBlock(keras.layers.Layer):
    """A pre-norm block: attention, then a feed-forward layer, each with a residual.

    Args:
        num_heads: attention heads; divides D.
        feed_forward: the layer on tokens (B, N, D), such as `MLP`.
        dropout: on the attention's output.
        attention_dropout: on the attention's weights.
        layer_norm_epsilon: of both normalisations.
        seed: of the dropout.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        training: passed on.

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if `num_heads` does not divide D, or an argument is out of range.

    Reference:
        *An Image is Worth 16x16 Words*, equations 2 and 3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import EncoderBlock, MLP
    >>> block = EncoderBlock(num_heads=2, feed_forward=MLP(mlp_dim=16))
    >>> tuple(block(np.ones((1, 4, 8), "float32")).shape)
    (1, 4, 8)
    """

    def __init__(
        self,
        num_heads: int,
        feed_forward: Any,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = check_integer("num_heads", num_heads)
        self.feed_forward = layer_argument(feed_forward, "feed_forward")
        self.dropout = check_dropout("dropout", dropout)
        self.attention_dropout = check_dropout("attention_dropout", attention_dropout)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.seed = seed
        self.attention_norm = LayerNorm(
            layer_norm_epsilon, dtype=self.dtype_policy, name="attention_norm"
        )
        self.feed_forward_norm = LayerNorm(
            layer_norm_epsilon, dtype=self.dtype_policy, name="feed_forward_norm"
        )
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        self.attention = self_attention(
            input_shape,
            self.num_heads,
            dropout=self.attention_dropout,
            # A seed of its own: both dropouts would drop alike otherwise.
            seed=None if self.seed is None else self.seed + 1,
            dtype=self.dtype_policy,
        )
        self.attention_norm.build(input_shape)
        self.feed_forward_norm.build(input_shape)
        build_once(self.feed_forward, input_shape)

    def _attend(self, tokens, training):
        x = self.attention_norm(tokens)
        x = self.attention(x, x, training=training)
        return tokens + self.dropout_layer(x, training=training)

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        tokens = self._attend(tokens, training)
        x = self.feed_forward_norm(tokens)
        return tokens + self.feed_forward(x, training=training)

    def compute_output_spec(self, tokens, training=None):
        return keras.KerasTensor(tokens.shape, self.compute_dtype)

    def parameters(self, dim: int) -> int:
        """The number of parameters for tokens of size `dim`."""
        return self._attention_parameters(dim) + self.feed_forward.parameters(dim)

    def active_parameters(self, num_tokens: int, dim: int) -> int:
        """The number of parameters that one token of `num_tokens` meets."""
        active = self.feed_forward.active_parameters(num_tokens, dim)
        return self._attention_parameters(dim) + active

    def _attention_parameters(self, dim):
        # Two norms; queries, keys, values and output, each with a bias.
        return 4 * dim + 4 * (dim + 1) * dim

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of the matmuls (2 per multiply-add)."""
        projections = 8 * num_tokens * dim * dim
        attention = 4 * num_tokens * num_tokens * dim
        return projections + attention + self.feed_forward.flops(num_tokens, dim)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_heads=self.num_heads,
            feed_forward=keras.saving.serialize_keras_object(self.feed_forward),
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            layer_norm_epsilon=self.layer_norm_epsilon,
            seed=self.seed,
        )
        return config


@keras.saving.register_keras_serializable("keras_moe")
class MoEEncoderBlock(EncoderBlock):
    """An `EncoderBlock` whose feed-forward layer is a mixture of experts.

    Args:
        num_heads: attention heads; divides D.
        feed_forward: an `MoE` layer.
        dropout: on the attention's output.
        attention_dropout: on the attention's weights.
        layer_norm_epsilon: of both normalisations.
        seed: of the dropout.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        training: passed on.

    Output shape:
        `(tokens, Routing)`: tokens (B, N, D), and the MoE layer's routing record.

    Raises:
        ValueError: as `EncoderBlock`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import Experts, MoE, MoEEncoderBlock
    >>> from keras_moe.routers import TokenChoiceRouter
    >>> moe = MoE(TokenChoiceRouter(num_experts=2), Experts(2, mlp_dim=16))
    >>> block = MoEEncoderBlock(num_heads=2, feed_forward=moe)
    >>> tokens, routing = block(np.ones((1, 4, 8), "float32"))
    >>> tuple(routing.dispatched.shape)
    (1, 4, 2)
    """

    def call(self, tokens, training=None):
        tokens = self._attend(tokens, training)
        x = self.feed_forward_norm(tokens)
        x, routing = self.feed_forward(x, training=training)
        return tokens + x, routing

    def compute_output_spec(self, tokens, training=None):
        tokens = keras.KerasTensor(tokens.shape, self.compute_dtype)
        return self.feed_forward.compute_output_spec(tokens)


def self_attention(
    input_shape: tuple, num_heads: int, name: str = "attention", **kwargs
) -> keras.layers.MultiHeadAttention:
    """A built `MultiHeadAttention` with ViT's initialisation for (B, N, D)."""
    dim = input_shape[-1]
    if dim % num_heads:
        raise ValueError(
            "Expected num_heads to divide the hidden size; received: "
            f"num_heads={num_heads}, hidden_dim={dim}"
        )
    # Glorot over the matrix D x D: Keras would take the heads for a spatial axis.
    limit = math.sqrt(3.0 / dim)
    attention = keras.layers.MultiHeadAttention(
        num_heads,
        dim // num_heads,
        kernel_initializer=keras.initializers.RandomUniform(-limit, limit),
        name=name,
        **kwargs,
    )
    attention.build(input_shape, input_shape)
    return attention
