"""Self-attention over tokens. Axes: B batch, N tokens, D hidden."""

import math
from typing import Any

import keras
from keras import ops

from keras_moe._checks import (
    argument_values,
    check_bool,
    check_dropout,
    check_integer,
    check_mask,
    check_seed,
)
from keras_moe._compat import get_keras_mask
from keras_moe._freezing import KeepsFrozen
from keras_moe.layers._inner_call import fused_bias, inner_call
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops._initializers import PathInitializer
from keras_moe.ops._nn import attend, has_float16_attention, has_own_attention
from keras_moe.ops.cost import Cost, under


@keras.saving.register_keras_serializable("keras_moe")
class SelfAttention(KeepsFrozen, keras.layers.MultiHeadAttention):
    """Multi-head self-attention, initialised as in ViT.

    Args:
        num_heads: number of attention heads.
        key_dim: size of a head; D / num_heads in ViT.
        query_key_norm: whether queries and keys are normalised per head, as in ViT-22B.
        query_key_norm_bias: whether that normalisation has an offset, as in timm.
        layer_norm_epsilon: epsilon of that normalisation.
        dropout: dropout rate on the attention weights.
        seed: seed of the dropout.
        causal: whether tokens attend only to themselves and earlier tokens.
        **kwargs: arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        tokens: (B, N, D).
        context: (B, M, D) to attend to; None for the tokens themselves.
        mask: boolean (B, M), False for padding, or (B, N, M) for pairs of tokens.
        training: whether dropout applies.

    Output shape: (B, N, D).

    Reference: *An Image is Worth 16x16 Words*, appendix A; *Scaling Vision Transformers
    to 22 Billion Parameters* (query-key normalisation).

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import SelfAttention
    >>> layer = SelfAttention(num_heads=2, key_dim=4, query_key_norm=True)
    >>> tuple(layer(np.ones((1, 3, 8), "float32")).shape)
    (1, 3, 8)
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        query_key_norm: bool = False,
        layer_norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        seed: int | None = None,
        query_key_norm_bias: bool = False,
        causal: bool = False,
        **kwargs,
    ):
        num_heads = check_integer("num_heads", num_heads)
        key_dim = check_integer("key_dim", key_dim)
        check_bool("query_key_norm", query_key_norm)
        if check_bool("query_key_norm_bias", query_key_norm_bias) > query_key_norm:
            raise ValueError(
                "Expected query_key_norm=True for query_key_norm_bias=True; received: "
                "query_key_norm=False"
            )
        if "kernel_initializer" not in kwargs:
            # Glorot uniform for the D x D matrix; Keras would count heads as a
            # receptive field.
            limit = math.sqrt(3.0 / (num_heads * key_dim))
            uniform = keras.initializers.RandomUniform(-limit, limit)
            kwargs["kernel_initializer"] = uniform
        kwargs.setdefault("name", "attention")
        check_dropout("dropout", dropout)
        check_seed("seed", seed)
        super().__init__(num_heads, key_dim, dropout=dropout, seed=seed, **kwargs)
        self.causal = check_bool("causal", causal)
        self._has_gate = bool(kwargs.get("use_gate"))
        self._is_plain = not (
            causal or kwargs.get("use_gate") or kwargs.get("sliding_window")
        )
        self.query_key_norm = query_key_norm
        self.query_key_norm_bias = query_key_norm_bias
        self.layer_norm_epsilon = layer_norm_epsilon
        if query_key_norm:
            # V-MoE's release has only a scale.
            self.query_norm, self.key_norm = (
                LayerNorm(
                    layer_norm_epsilon,
                    center=query_key_norm_bias,
                    dtype=self.dtype_policy,
                    name=f"{name}_norm",
                )
                for name in ("query", "key")
            )

    def build(self, tokens_shape, context_shape=None):
        super().build(tokens_shape, context_shape or tokens_shape)
        projections = self.query_dense, self.key_dense, self.value_dense
        for dense in (*projections, self.output_dense):
            fused_bias(dense)
        if self.query_key_norm:
            for norm in (self.query_norm, self.key_norm):
                norm.build((None, None, self.num_heads, self.key_dim))

    def call(
        self,
        tokens: Any,
        context: Any = None,
        mask: Any = None,
        training: bool | None = None,
    ) -> Any:
        context = tokens if context is None else context
        if mask is not None:
            pairs = (*tokens.shape[:2], context.shape[1])
            mask = check_mask("mask", mask, (pairs[0], pairs[2]), pairs)
            mask = ops.cast(mask, "bool")
            mask = mask if len(mask.shape) == 3 else ops.expand_dims(mask, 1)
        masks = [get_keras_mask(x) for x in (tokens, context)]
        if self._is_plain and masks == [None, None]:
            # Keras's `call`, with cheap calls of the projections.
            query = inner_call(self.query_dense, tokens)
            key, value = (
                inner_call(dense, context)
                for dense in (self.key_dense, self.value_dense)
            )
            outputs, _ = self._compute_attention(query, key, value, mask, training)
            return inner_call(self.output_dense, outputs)
        return super().call(
            tokens,
            context,
            attention_mask=mask,
            use_causal_mask=self.causal,
            training=training,
        )

    def compute_output_spec(self, tokens, context=None, mask=None, training=None):
        return keras.KerasTensor(tokens.shape, self.compute_dtype)

    def compute_mask(self, tokens, context=None, previous_mask=None):
        return previous_mask

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
    ):
        if self.query_key_norm:
            query = inner_call(self.query_norm, query)
            key = inner_call(self.key_norm, key)
        scale = 1.0 / math.sqrt(self.key_dim)
        attends_directly = (
            has_own_attention(query)
            and self.dropout == 0.0
            and not return_attention_scores
            # Otherwise the user has chosen a kernel, and Keras obeys.
            and keras.config.is_flash_attention_enabled() is None
        )
        if attends_directly:
            if attention_mask is not None:
                attention_mask = ops.expand_dims(attention_mask, 1)
            return attend(query, key, value, scale, attention_mask), None
        if self.compute_dtype == "float16" and not has_float16_attention():
            query, key, value = (ops.cast(x, "float32") for x in (query, key, value))
        outputs, weights = super()._compute_attention(
            query, key, value, attention_mask, training, return_attention_scores
        )
        return ops.cast(outputs, self.compute_dtype), weights

    def _get_common_kwargs_for_sublayer(self):
        arguments = super()._get_common_kwargs_for_sublayer()
        # Keras asks for each sublayer before it makes it.
        names = ["query", "key", *["gate"] * self._has_gate, "value"]
        made = sum(hasattr(self, f"_{name}_dense") for name in names)
        path = [*names, "attention_output"][made]
        for name in ("kernel", "bias"):
            argument = f"{name}_initializer"
            arguments[argument] = PathInitializer(
                arguments[argument], f"{self.path}/{path}/{name}"
            )
        return arguments

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        num_tokens, dim = shape
        heads = (self.num_heads, self.key_dim)
        shapes = {}
        for name in ("query", "key", "value"):
            shapes[f"{name}/kernel"] = (dim, *heads)
            if self.use_bias:
                shapes[f"{name}/bias"] = heads
        shapes["attention_output/kernel"] = (*heads, dim)
        if self.use_bias:
            shapes["attention_output/bias"] = (dim,)
        if self.query_key_norm:
            for norm in (self.query_norm, self.key_norm):
                in_head = norm.weight_shapes((num_tokens, self.key_dim))
                shapes.update(under(norm.name, in_head))
        return shapes

    def cost(self, shape: tuple[int, int]) -> Cost:
        num_tokens, dim = shape
        inner = self.num_heads * self.key_dim
        flops = 8 * num_tokens * dim * inner + 4 * num_tokens * num_tokens * inner
        return Cost.all_active(self.weight_shapes(shape), flops)

    def get_config(self):
        own = argument_values(self, keras.layers.MultiHeadAttention)
        return {**super().get_config(), **own}
