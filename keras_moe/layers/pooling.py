"""Pooling of tokens to one vector. Axes: B batch, N tokens, D hidden."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe import _checks
from keras_moe._types import Activation, Config, DType, Tensor
from keras_moe.layers import activations
from keras_moe.layers._layer import Layer
from keras_moe.layers.attention import Attention
from keras_moe.layers.mlp import MLP
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops.cost import Cost

TOKEN_POOLINGS = ("class_token", "first", "average", "patch_average")
POOLINGS = (*TOKEN_POOLINGS, "map")


class _Pooling(Layer):
    """From tokens (B, N, D) to (B, D)."""

    def compute_mask(self, tokens, previous_mask=None):
        return None

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])


@keras.saving.register_keras_serializable("keras_moe")
class TokenPooling(_Pooling):
    """Selects one token or averages tokens.

    Args:
        pooling: `"class_token"` (the first token, if there is a class token), `"first"`
            (the first patch, if there is none), `"average"`, or `"patch_average"` (all
            tokens but the first).
        register_tokens: number of registers behind the class token, which take no part.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for padding; None for no padding.

    Output shape: (B, D).

    Example:

    >>> from keras_moe.layers import TokenPooling
    >>> tokens = np.array([[[1.0], [3.0]]], "float32")
    >>> float(TokenPooling("average")(tokens)[0, 0])
    2.0
    """

    def __init__(self, pooling: str, register_tokens: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.pooling = _checks.check_one_of("pooling", pooling, TOKEN_POOLINGS)
        self.register_tokens = _checks.check_integer(
            "register_tokens", register_tokens, minimum=0
        )

    def call(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.pooling == "class_token":
            return tokens[:, 0]
        first = self.register_tokens + (self.pooling == "patch_average")
        if tokens.shape[1] is not None and tokens.shape[1] <= first:
            raise _checks.unfit(f"more than {first} tokens", tokens=tokens.shape[1])
        tokens = tokens[:, first:]
        if self.pooling == "first":
            return tokens[:, 0]
        if mask is None:
            return ops.mean(tokens, axis=1)
        return masked_mean(tokens, mask[:, first:], self.compute_dtype)


def masked_mean(tokens: Tensor, mask: Tensor, dtype: str) -> Tensor:
    """The mean (B, D) of the tokens that are not padding; zeros without any."""
    kept = ops.where(ops.expand_dims(mask, -1), tokens, 0.0)
    total = ops.sum(ops.cast(kept, "float32"), axis=1)
    count = ops.sum(ops.cast(mask, "float32"), axis=1, keepdims=True)
    return ops.cast(total / ops.maximum(count, 1.0), dtype)


@keras.saving.register_keras_serializable("keras_moe")
class AttentionPooling(_Pooling):
    """Multihead attention pooling ("MAP"): a learned probe attends to the tokens.

    An MLP with a residual follows the attention.

    Args:
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: hidden size of the MLP.
        activation: activation of the MLP.
        layer_norm_epsilon: epsilon of all normalisations.
        query_key_norm: whether queries and keys are normalised per head, as in V-MoE.
        query_key_norm_bias: whether that normalisation has an offset.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for padding.

    Output shape: (B, D).

    Reference: *Scaling Vision Transformers*, section 3.2 (the MAP head).

    Example:

    >>> from keras_moe.layers import AttentionPooling
    >>> layer = AttentionPooling(num_heads=2, mlp_dim=16)
    >>> tuple(layer(np.ones((2, 4, 8), "float32")).shape)
    (2, 8)
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        activation: Activation = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        query_key_norm: bool = False,
        query_key_norm_bias: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.activation = activations.get(activation)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.query_key_norm = _checks.check_bool("query_key_norm", query_key_norm)
        self.query_key_norm_bias = query_key_norm_bias
        self.mlp = MLP(mlp_dim, activation, dtype=self.dtype_policy, name="mlp")
        self.norm = LayerNorm(layer_norm_epsilon, dtype=self.dtype_policy, name="norm")

    def build(self, input_shape):
        dim = input_shape[-1]
        self.probe = self.add_weight(
            name="probe", shape=(1, 1, dim), initializer="glorot_uniform"
        )
        self.attention = self._attention(dim)
        self.attention.build((None, 1, dim), input_shape)
        self.norm.build((None, 1, dim))
        self.mlp.build((None, 1, dim))

    def _attention(self, dim):
        return Attention(
            self.num_heads,
            _checks.head_size(self.num_heads, dim),
            query_key_norm="layer" if self.query_key_norm else None,
            query_key_norm_bias=self.query_key_norm_bias,
            layer_norm_epsilon=self.layer_norm_epsilon,
            dtype=self.dtype_policy,
        )

    def call(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, _, dim = ops.shape(tokens)
        probe = ops.broadcast_to(self.probe, (batch, 1, dim))
        x = self.attention(probe, tokens, mask=mask)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        return dict.fromkeys((self._attention(shape[-1]), self.norm, self.mlp), shape)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"probe": (1, 1, shape[-1]), **super().weight_shapes(shape)}

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        # Query and output projections of the probe, key and value of all tokens.
        flops = 4 * (num_tokens + 1) * dim * dim + 4 * num_tokens * dim
        flops += self.mlp.cost((1, dim)).flops
        return Cost.all_active(self.weight_shapes(shape), flops)


MASKED_POOLINGS = ("first", "last", "end_of_text", "average", "max")


@keras.saving.register_keras_serializable("keras_moe")
class MaskedPooling(_Pooling):
    """Pools the tokens that are not padding; examples without any get zeros.

    Args:
        pooling: `"first"`, `"last"`, `"average"` or `"max"` (per channel) of the
            unmasked tokens; or `"end_of_text"`, the first token with the id below.
        end_of_text_id: id for `"end_of_text"`; None for the largest id of each text, as
            in published CLIP weights. Texts without the id use their last token.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for padding; None for no padding.
        token_ids: integers (B, N), for `"end_of_text"`.

    Output shape: (B, D).

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.4; *Multimodal Contrastive Learning with LIMoE*, section 2 (average of a
    modality's tokens).

    Example:

    >>> from keras_moe.layers import MaskedPooling
    >>> tokens = np.array([[[1.0], [3.0], [100.0]]], "float32")
    >>> mask = np.array([[True, True, False]])
    >>> float(MaskedPooling("average")(tokens, mask=mask)[0, 0])
    2.0
    """

    def __init__(self, pooling: str, end_of_text_id: int | None = None, **kwargs):
        _checks.check_one_of("pooling", pooling, MASKED_POOLINGS)
        if end_of_text_id is not None:
            end_of_text_id = _checks.check_integer("end_of_text_id", end_of_text_id, 0)
            if pooling != "end_of_text":
                expected = f"end_of_text_id=None for pooling={pooling!r}"
                raise _checks.unfit(expected, f"end_of_text_id={end_of_text_id}")
        # Tokens are cast in `call`; ids stay integers.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.pooling = pooling
        self.end_of_text_id = end_of_text_id

    def build(self, input_shape):
        pass

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        shape = tuple(tokens.shape)[:2]
        _checks.check_mask("mask", mask, shape)
        if mask is None:
            mask = ops.ones(ops.shape(tokens)[:2], "bool")
        mask = ops.cast(mask, "bool")
        if self.pooling == "average":
            return masked_mean(tokens, mask, self.compute_dtype)
        if self.pooling == "max":
            kept = ops.where(ops.expand_dims(mask, -1), tokens, -np.inf)
            # PyTorch needs an initial value for empty batches.
            largest = ops.max(kept, axis=1, initial=-np.inf)
            largest = ops.where(ops.any(mask, axis=1, keepdims=True), largest, 0.0)
            return ops.cast(largest, self.compute_dtype)
        taken = mask
        if self.pooling == "end_of_text":
            if token_ids is None:
                raise _checks.unfit(
                    "token_ids for pooling='end_of_text'", "token_ids=None"
                )
            _checks.check_ids("token_ids", token_ids, shape)
            taken = self._ends_of_text(ops.cast(token_ids, "int32"), mask)
        taken = ops.expand_dims(_only(taken, last=self.pooling == "last"), -1)
        # Not a product, since padding may hold infinities.
        pooled = ops.sum(ops.where(taken, tokens, 0.0), axis=1)
        return ops.cast(pooled, self.compute_dtype)

    def _ends_of_text(self, token_ids, mask):
        """Flags tokens that end their texts; the first one counts."""
        if self.end_of_text_id is None:
            token_ids = ops.where(mask, token_ids, -1)
            largest = ops.max(token_ids, axis=1, keepdims=True)
            return ops.logical_and(mask, ops.equal(token_ids, largest))
        ends = ops.logical_and(mask, ops.equal(token_ids, self.end_of_text_id))
        has_end = ops.any(ends, axis=1, keepdims=True)
        return ops.where(has_end, ends, _only(mask, last=True))


def _only(flags, last):
    """Keeps only the first or last True of each row."""
    flags = ops.cast(flags, "int32")
    if last:
        flags = ops.flip(flags, axis=1)
    is_first = ops.equal(ops.cumsum(flags, axis=1), 1)
    first = ops.logical_and(ops.equal(flags, 1), is_first)
    return ops.flip(first, axis=1) if last else first


def check_pooling(pooling: str | None, class_token: bool) -> str:
    """Returns the pooling or its default, if the backbone supports it."""
    if pooling is None:
        return "class_token" if class_token else "average"
    _checks.check_one_of("pooling", pooling, POOLINGS)
    needed = {"class_token": True, "patch_average": True, "first": False}
    if needed.get(pooling, class_token) != class_token:
        raise ValueError(
            f"Expected a backbone with class_token={not class_token} for "
            f"pooling={pooling!r}; received: class_token={class_token}"
        )
    return pooling


def pooling_layer(
    config: Config,
    pooling: str | None,
    query_key_norm: bool | None,
    dtype: DType | None,
) -> TokenPooling | AttentionPooling:
    """Creates the pooling layer for a backbone's arguments, unbuilt."""
    pooling = check_pooling(pooling, config.get("class_token", False))
    if pooling == "map" and "num_heads" not in config:
        expected = "pooling=None or 'average' for a backbone without attention heads"
        raise _checks.unfit(expected, "pooling='map'")
    if pooling != "map" and query_key_norm is not None:
        expected = "pooling='map' with pooling_query_key_norm"
        raise _checks.unfit(
            expected, pooling=pooling, pooling_query_key_norm=query_key_norm
        )
    registers = config.get("register_tokens", 0)
    if registers and pooling == "average" and config.get("class_token"):
        raise _checks.unfit(
            "pooling='class_token' or 'patch_average' with a class token and registers",
            pooling=pooling,
        )
    if pooling != "map":
        return TokenPooling(pooling, registers, dtype=dtype, name="pooler")
    normalizes = bool(config.get("query_key_norm", False))
    if query_key_norm is not None:
        normalizes = query_key_norm
    return AttentionPooling(
        config["num_heads"],
        config["mlp_dim"],
        activation=config["activation"],
        layer_norm_epsilon=config["layer_norm_epsilon"],
        query_key_norm=normalizes,
        query_key_norm_bias=normalizes and config.get("query_key_norm_bias", False),
        dtype=dtype,
        name="pooler",
    )
