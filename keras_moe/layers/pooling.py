"""From tokens to one vector per image.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import head_size
from keras_moe.layers.mlp import MLP
from keras_moe.layers.normalization import LayerNorm
from keras_moe.layers.self_attention import SelfAttention, check_query_key_norm
from keras_moe.ops.cost import Cost, under
from keras_moe.ops.initializers import FastInitializer

TOKEN_POOLINGS = ("class_token", "first", "average", "patch_average")
POOLINGS = (*TOKEN_POOLINGS, "map")


@keras.saving.register_keras_serializable("keras_moe")
class TokenPooling(keras.layers.Layer):
    """Takes one token, or an average of tokens.

    Args:
        pooling: `"class_token"` (the first token, before the patches), `"first"` (the
            first patch's token, where there is no class token), `"average"` or
            `"patch_average"` (all tokens but the first).
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (B, N, D).

    Output shape:
        (B, D).

    Raises:
        ValueError: if `pooling` is unknown.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import TokenPooling
    >>> tokens = np.array([[[1.0], [3.0]]], "float32")
    >>> float(TokenPooling("average")(tokens)[0, 0])
    2.0
    """

    def __init__(self, pooling: str, **kwargs):
        if pooling not in TOKEN_POOLINGS:
            raise ValueError(
                f"Expected pooling to be one of {TOKEN_POOLINGS}; "
                f"received: pooling={pooling!r}"
            )
        super().__init__(**kwargs)
        self.pooling = pooling

    def call(self, tokens: Any) -> Any:
        if self.pooling in ("class_token", "first"):
            return tokens[:, 0]
        if self.pooling == "patch_average":
            tokens = tokens[:, 1:]
        return ops.mean(tokens, axis=1)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path: none.

        Args:
            shape: (num_tokens, dim).
        """
        return {}

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        return Cost()

    def get_config(self):
        return {**super().get_config(), "pooling": self.pooling}


@keras.saving.register_keras_serializable("keras_moe")
class AttentionPooling(keras.layers.Layer):
    """Multihead attention pooling ("MAP"): a learned probe reads the tokens.

    The probe attends to the tokens, and an MLP with a residual follows.

    Args:
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: hidden size of the MLP.
        activation: activation of the MLP.
        layer_norm_epsilon: epsilon of all normalisations.
        query_key_norm: whether attention normalises queries and keys in each head, as
            V-MoE's head does where its blocks do.
        query_key_norm_bias: whether that normalisation has an offset.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for padding, which the probe does not read.

    Output shape:
        (B, D).

    Raises:
        ValueError: if `num_heads` does not divide D, or an offset is asked for without
            its normalisation.

    Reference:
        *Scaling Vision Transformers*, section 3.2 (the MAP head).

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import AttentionPooling
    >>> layer = AttentionPooling(num_heads=2, mlp_dim=16)
    >>> tuple(layer(np.ones((2, 4, 8), "float32")).shape)
    (2, 8)
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        activation: Any = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        query_key_norm: bool = False,
        query_key_norm_bias: bool = False,
        **kwargs,
    ):
        check_query_key_norm(query_key_norm, query_key_norm_bias)
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.layer_norm_epsilon = layer_norm_epsilon
        self.query_key_norm = query_key_norm
        self.query_key_norm_bias = query_key_norm_bias
        self.mlp = MLP(mlp_dim, activation, dtype=self.dtype_policy, name="mlp")
        self.norm = LayerNorm(layer_norm_epsilon, dtype=self.dtype_policy, name="norm")

    def build(self, input_shape):
        dim = input_shape[-1]
        self.probe = self.add_weight(
            name="probe",
            shape=(1, 1, dim),
            initializer=FastInitializer("glorot_uniform"),
        )
        self.attention = self._attention(dim)
        self.attention.build((None, 1, dim), input_shape)
        self.norm.build((None, 1, dim))
        self.mlp.build((None, 1, dim))

    def _attention(self, dim):
        return SelfAttention(
            self.num_heads,
            head_size(self.num_heads, dim),
            query_key_norm=self.query_key_norm,
            query_key_norm_bias=self.query_key_norm_bias,
            layer_norm_epsilon=self.layer_norm_epsilon,
            dtype=self.dtype_policy,
        )

    def call(self, tokens: Any, mask: Any = None) -> Any:
        batch, _, dim = ops.shape(tokens)
        probe = ops.broadcast_to(self.probe, (batch, 1, dim))
        x = self.attention(probe, tokens, mask=mask)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]

    def compute_mask(self, tokens, previous_mask=None):
        # Nothing is left to mask.
        return None

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens, dim).
        """
        attention = self._attention(shape[-1])
        shapes = {"probe": (1, 1, shape[-1])}
        for part in (attention, self.norm, self.mlp):
            shapes.update(under(part.name, part.weight_shapes(shape)))
        return shapes

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        num_tokens, dim = shape
        # Queries and outputs of the probe, keys and values of all tokens.
        flops = 4 * (num_tokens + 1) * dim * dim + 4 * num_tokens * dim
        flops += self.mlp.cost((1, dim)).flops
        return Cost.all_active(self.weight_shapes(shape), flops)

    def get_config(self):
        config = super().get_config()
        mlp = self.mlp.get_config()
        config.update(
            num_heads=self.num_heads,
            mlp_dim=mlp["mlp_dim"],
            activation=mlp["activation"],
            layer_norm_epsilon=self.layer_norm_epsilon,
            query_key_norm=self.query_key_norm,
            query_key_norm_bias=self.query_key_norm_bias,
        )
        return config
