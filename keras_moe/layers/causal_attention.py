"""Causal attention with grouped queries, rotary positions and a cache.

Axes: B batch, N tokens, M tokens with the cached ones, D hidden.
"""

import math
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_bool, check_dropout, check_integer, check_seed
from keras_moe.layers._inner_call import dropped_out, fused_bias, inner_call
from keras_moe.layers._layer import Layer, layer_argument
from keras_moe.layers.normalization import norm_layer
from keras_moe.ops._initializers import PathInitializer
from keras_moe.ops._nn import attend, has_own_attention
from keras_moe.ops.cost import Cost, under


@keras.saving.register_keras_serializable("keras_moe")
class CausalMask(keras.layers.Layer):
    """Which tokens a token attends to, and its position in its document.

    A token attends to itself and to the earlier tokens of its document. Its position is
    the number of these, so neither padding nor other documents of the row change it.

    Args:
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        documents: integers or booleans (B, M): the number of each token's document; 0
            is padding.
        start: index of the first query among the M tokens.
        num_queries: N, the number of queries; None for all M tokens.

    Output shape: `(mask, positions)`: booleans (B, N, M), and int32 (B, N).

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import CausalMask
    >>> mask, positions = CausalMask()(np.array([[1, 1, 2, 0]]))
    >>> np.array(mask)[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    >>> np.array(positions).tolist()
    [[0, 1, 0, 0]]
    """

    def call(
        self, documents: Any, start: Any = 0, num_queries: int | None = None
    ) -> tuple[Any, Any]:
        documents = ops.cast(documents, "int32")
        index = ops.cumsum(ops.ones_like(documents), axis=1) - 1
        own, at = documents, index
        if num_queries is not None:
            shape = (ops.shape(documents)[0], num_queries)
            own, at = (ops.slice(x, (0, start), shape) for x in (documents, index))
        own, at = ops.expand_dims(own, 2), ops.expand_dims(at, 2)
        documents, index = ops.expand_dims(documents, 1), ops.expand_dims(index, 1)
        same = ops.logical_and(own == documents, documents != 0)
        mask = ops.logical_and(same, index <= at)
        # Padding attends to itself: a row of False has no softmax.
        mask = ops.logical_or(mask, index == at)
        return mask, ops.sum(ops.cast(mask, "int32"), axis=-1) - 1

    def compute_output_spec(self, documents, start=0, num_queries=None):
        batch, length = documents.shape
        queries = length if num_queries is None else num_queries
        return (
            keras.KerasTensor((batch, queries, length), "bool"),
            keras.KerasTensor((batch, queries), "int32"),
        )


@keras.saving.register_keras_serializable("keras_moe")
class CausalAttention(Layer):
    """Attention of a language model: grouped queries, rotary positions and a cache.

    Args:
        num_heads: number of query heads.
        key_dim: size of a head.
        num_key_value_heads: number of heads of keys and values, which divides
            `num_heads`; None for `num_heads`.
        rotary: layer that rotates queries and keys by their `positions`, such as
            `keras_hub.layers.RotaryEmbedding`; None for none.
        use_bias: whether the projections have biases.
        dropout: dropout rate on the attention weights.
        seed: seed of the dropout.
        query_key_norm: `"layer"` or `"rms"` to normalise queries and keys per head
            before they are rotated, or None.
        query_key_norm_bias: whether such a layer norm has an offset.
        layer_norm_epsilon: epsilon of that norm.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: booleans (B, N, M), see `CausalMask`.
        positions: integers (B, N), for `rotary`.
        cache: pair of keys and values (B, M, heads, key_dim); None to attend to the
            tokens only.
        start: index of the first token in the cache.
        training: whether dropout applies.

    Output shape: (B, N, D), and with a cache also the pair with these tokens in it.

    Reference: *GQA: Training Generalized Multi-Query Transformer Models*; *RoFormer*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import CausalAttention, CausalMask
    >>> layer = CausalAttention(num_heads=4, key_dim=2, num_key_value_heads=2)
    >>> mask, positions = CausalMask()(np.ones((1, 3), "int32"))
    >>> tuple(layer(np.ones((1, 3, 8), "float32"), mask, positions).shape)
    (1, 3, 8)
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_key_value_heads: int | None = None,
        rotary: Any = None,
        use_bias: bool = True,
        dropout: float = 0.0,
        seed: int | None = None,
        query_key_norm: str | None = None,
        query_key_norm_bias: bool = False,
        layer_norm_epsilon: float = 1e-6,
        **kwargs,
    ):
        kwargs.setdefault("name", "attention")
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_integer("num_heads", num_heads)
        self.key_dim = check_integer("key_dim", key_dim)
        self.num_key_value_heads = check_key_value_heads(num_key_value_heads, num_heads)
        self.rotary = None
        if rotary is not None:
            self.rotary = layer_argument(rotary, "rotary")
            self.rotary.supports_masking = True
        self.use_bias = check_bool("use_bias", use_bias)
        self.dropout = check_dropout("dropout", dropout)
        self.seed = check_seed("seed", seed)
        self.query_key_norm = query_key_norm
        self.query_key_norm_bias = check_bool(
            "query_key_norm_bias", query_key_norm_bias
        )
        self.layer_norm_epsilon = layer_norm_epsilon
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )
        if query_key_norm is not None:
            self.query_norm, self.key_norm = (
                norm_layer(
                    query_key_norm,
                    layer_norm_epsilon,
                    query_key_norm_bias,
                    dtype=self.dtype_policy,
                    name=f"{name}_norm",
                )
                for name in ("query", "key")
            )

    def _dense(self, equation, output_shape, bias_axes, name):
        # Glorot uniform for the D x D matrix; Keras would count heads as a receptive
        # field.
        limit = math.sqrt(3.0 / (self.num_heads * self.key_dim))
        uniform, path = keras.initializers.RandomUniform(-limit, limit), self.path
        dense = keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            bias_axes=bias_axes if self.use_bias else None,
            kernel_initializer=PathInitializer(uniform, f"{path}/{name}/kernel"),
            bias_initializer=PathInitializer("zeros", f"{path}/{name}/bias"),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.supports_masking = True
        return dense

    def build(self, tokens_shape, *_):
        dim, heads = tokens_shape[-1], (self.num_heads, self.key_dim)
        for name in ("query", "key", "value"):
            num = self.num_heads if name == "query" else self.num_key_value_heads
            shape = (None, num, self.key_dim)
            dense = self._dense("abc,cde->abde", shape, "de", name)
            fused_bias(dense).build((None, None, dim))
            setattr(self, f"{name}_dense", dense)
        self.output_dense = self._dense(
            "abde,dec->abc", (None, dim), "c", "attention_output"
        )
        fused_bias(self.output_dense).build((None, None, *heads))
        if self.query_key_norm is not None:
            self.query_norm.build((None, None, *heads))
            self.key_norm.build((None, None, self.num_key_value_heads, self.key_dim))

    def call(
        self,
        tokens: Any,
        mask: Any,
        positions: Any = None,
        cache: Any = None,
        start: Any = 0,
        training: bool | None = None,
    ) -> Any:
        query, key, value = (
            inner_call(dense, tokens)
            for dense in (self.query_dense, self.key_dense, self.value_dense)
        )
        if self.query_key_norm is not None:
            query = inner_call(self.query_norm, query)
            key = inner_call(self.key_norm, key)
        if self.rotary is not None:
            query, key = (self.rotary(x, positions=positions) for x in (query, key))
        if cache is not None:
            key, value = (
                ops.slice_update(old, (0, start, 0, 0), ops.cast(new, old.dtype))
                for old, new in zip(cache, (key, value))
            )
        attended = self._attend(query, key, value, mask, training)
        outputs = inner_call(self.output_dense, attended)
        return outputs if cache is None else (outputs, (key, value))

    def _attend(self, query, key, value, mask, training):
        groups = self.num_heads // self.num_key_value_heads
        scale = 1.0 / math.sqrt(self.key_dim)
        is_torch = keras.backend.backend() == "torch"
        has_kernel = has_own_attention(query) and (is_torch or groups == 1)
        if has_kernel and not (training and self.dropout):
            if groups > 1:
                key, value = (ops.repeat(x, groups, axis=2) for x in (key, value))
            return attend(query, key, value, scale, ops.expand_dims(mask, 1))
        # The queries of a group share its keys, which are not copied.
        num_queries = ops.shape(query)[1]
        split = (-1, num_queries, self.num_key_value_heads, groups, self.key_dim)
        query = ops.reshape(query * scale, split)
        logits = ops.einsum("bnkgd,bmkd->bkgnm", query, key)
        logits = ops.cast(logits, "float32")
        logits = ops.where(ops.expand_dims(mask, (1, 2)), logits, -1e30)
        weights = ops.cast(ops.softmax(logits, axis=-1), self.compute_dtype)
        weights = dropped_out(self.dropout_layer, weights, training)
        outputs = ops.einsum("bkgnm,bmkd->bnkgd", weights, value)
        return ops.reshape(outputs, (-1, num_queries, self.num_heads, self.key_dim))

    def compute_output_spec(
        self, tokens, mask, positions=None, cache=None, start=0, training=None
    ):
        return keras.KerasTensor(tokens.shape, self.compute_dtype)

    def cache_shape(self, batch_size: Any, length: int) -> tuple:
        """The shape of the cached keys, and of the values."""
        return (batch_size, length, self.num_key_value_heads, self.key_dim)

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        num_tokens, dim = shape
        shapes = {}
        for name in ("query", "key", "value"):
            heads = self.num_heads if name == "query" else self.num_key_value_heads
            shapes[f"{name}/kernel"] = (dim, heads, self.key_dim)
            if self.use_bias:
                shapes[f"{name}/bias"] = (heads, self.key_dim)
        shapes["attention_output/kernel"] = (self.num_heads, self.key_dim, dim)
        if self.use_bias:
            shapes["attention_output/bias"] = (dim,)
        if self.query_key_norm is not None:
            for norm in (self.query_norm, self.key_norm):
                in_head = norm.weight_shapes((num_tokens, self.key_dim))
                shapes.update(under(norm.name, in_head))
        return shapes

    def cost(self, shape: tuple[int, int]) -> Cost:
        num_tokens, dim = shape
        heads = 2 * self.num_heads + 2 * self.num_key_value_heads
        flops = 2 * num_tokens * dim * heads * self.key_dim
        # As for other attention, all pairs count, though half of them are masked.
        flops += 4 * num_tokens * num_tokens * self.num_heads * self.key_dim
        return Cost.all_active(self.weight_shapes(shape), flops)


def check_key_value_heads(num_key_value_heads: int | None, num_heads: int) -> int:
    """Returns the number of heads of keys and values, which divides `num_heads`."""
    heads = num_heads if num_key_value_heads is None else num_key_value_heads
    if num_heads % check_integer("num_key_value_heads", heads):
        raise ValueError(
            f"Expected num_key_value_heads to divide num_heads={num_heads}; received: "
            f"num_key_value_heads={num_key_value_heads}"
        )
    return heads
