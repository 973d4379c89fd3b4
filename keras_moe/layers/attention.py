"""Multi-head attention of image, text and language models.

Axes: B batch, N tokens, M tokens attended to, D hidden.
"""

import math
from typing import Any

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._compat import get_keras_mask
from keras_moe._types import Config, Initializer, Tensor
from keras_moe.layers import _layer
from keras_moe.layers.normalization import NORMS, norm_layer
from keras_moe.ops._nn import attend, has_float16_attention, has_own_attention
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

    >>> from keras_moe.layers import CausalMask
    >>> mask, positions = CausalMask()(np.array([[1, 1, 2, 0]]))
    >>> np.array(mask)[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    >>> np.array(positions).tolist()
    [[0, 1, 0, 0]]
    """

    def call(
        self, documents: Tensor, start: int | Tensor = 0, num_queries: int | None = None
    ) -> tuple[Any, Any]:
        documents = ops.cast(documents, "int32")
        index = ops.cumsum(ops.ones_like(documents), axis=1) - 1
        own, at = documents, index
        if num_queries is not None:
            # A slice at a place that a tensor tells is no part of a PyTorch graph.
            places = ops.cast(start, "int32") + ops.arange(num_queries)
            own, at = (ops.take(x, places, axis=1) for x in (documents, index))
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
class Attention(_layer.Layer):
    """Multi-head attention, initialised as in ViT.

    It is self-attention, or cross-attention to a `context`. Queries in groups share the
    keys and values of one head; positions rotate queries and keys; a cache holds the
    keys and values of earlier tokens.

    Args:
        num_heads: number of query heads.
        key_dim: size of a head; D / num_heads in ViT.
        num_key_value_heads: number of heads of keys and values, which divides
            `num_heads`; None for `num_heads`.
        positions: layer that rotates queries and keys (B, N, heads, key_dim) by their
            `positions`, such as `keras_hub.layers.RotaryEmbedding`; None for none.
        query_key_norm: `"layer"`, `"rms"` or `"plain_rms"` (without a scale) to
            normalise queries and keys per head, as in ViT-22B, before they are rotated;
            None for no norm.
        causal: whether tokens attend only to themselves and earlier tokens. A `mask` of
            `CausalMask` needs no `causal=True`.
        query_key_norm_bias: whether a layer norm has an offset, as in timm.
        layer_norm_epsilon: epsilon of the norms.
        dropout: dropout rate on the attention weights.
        use_bias: whether the projections have biases.
        key_bias: whether keys have one, too; DINOv3's do not.
        sinks: whether each head has a learned logit that takes part in the softmax and
            adds nothing, so that a head may attend to no token: its output is times
            sigmoid(logsumexp(logits) - sink).
        kernel_initializer: initializer of the projections; None for the Glorot uniform
            initializer of a matrix (D, D).
        seed: seed of the dropout.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        context: (B, M, D) to attend to; None for the tokens themselves.
        mask: boolean (B, M), False for padding, or (B, N, M) for pairs of tokens.
        positions: integers for the layer `positions`: (B, N), of the tokens, or what
            else it takes.
        cache: pair of keys and values (B, M, heads, key_dim), to which those of the
            tokens are added; None to attend to the tokens only.
        start: index of the first token in the cache.
        training: whether dropout applies.

    Output shape: (B, N, D), and with a cache also the pair with these tokens in it.

    Reference: *An Image is Worth 16x16 Words*, appendix A; *Scaling Vision Transformers
    to 22 Billion Parameters* (query-key normalisation); *GQA: Training Generalized
    Multi-Query Transformer Models*; *RoFormer*.

    Example:

    >>> from keras_moe.layers import Attention
    >>> layer = Attention(num_heads=2, key_dim=4, query_key_norm="layer")
    >>> tuple(layer(np.ones((1, 3, 8), "float32")).shape)
    (1, 3, 8)
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_key_value_heads: int | None = None,
        positions: keras.layers.Layer | Config | None = None,
        query_key_norm: str | None = None,
        causal: bool = False,
        query_key_norm_bias: bool = False,
        layer_norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        use_bias: bool = True,
        key_bias: bool = True,
        sinks: bool = False,
        kernel_initializer: Initializer | None = None,
        seed: int | None = None,
        **kwargs,
    ):
        kwargs.setdefault("name", "attention")
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = _checks.check_integer("num_heads", num_heads)
        self.key_dim = _checks.check_integer("key_dim", key_dim)
        self.num_key_value_heads = check_key_value_heads(num_key_value_heads, num_heads)
        self.positions = None
        if positions is not None:
            self.positions = _layer.layer_argument(positions, "positions")
            self.positions.supports_masking = True
        self.query_key_norm = _checks.check_one_of(
            "query_key_norm", query_key_norm, (None, *NORMS)
        )
        self.query_key_norm_bias = _checks.check_bool(
            "query_key_norm_bias", query_key_norm_bias
        )
        if query_key_norm_bias and query_key_norm is None:
            expected = "query_key_norm_bias=False for layers without query_key_norm"
            raise _checks.unfit(expected, "query_key_norm_bias=True")
        self.causal = _checks.check_bool("causal", causal)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.dropout = _checks.check_dropout("dropout", dropout)
        self.use_bias = _checks.check_bool("use_bias", use_bias)
        self.key_bias = _checks.check_bool("key_bias", key_bias)
        self.sinks = _checks.check_bool("sinks", sinks)
        self.seed = _checks.check_seed("seed", seed)
        if kernel_initializer is None:
            # Keras would count the heads of a kernel as a receptive field.
            limit = math.sqrt(3.0 / (num_heads * key_dim))
            kernel_initializer = keras.initializers.RandomUniform(-limit, limit)
        self.kernel_initializer = _checks.check_initializer(
            "kernel_initializer", kernel_initializer
        )
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )
        if query_key_norm is not None:
            # V-MoE's release has only a scale.
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

    def build(self, tokens_shape, context_shape=None):
        dim, context_dim = tokens_shape[-1], (context_shape or tokens_shape)[-1]
        heads = (self.num_heads, self.key_dim)
        shared = (self.num_key_value_heads, self.key_dim)
        into, out_of = ("abc,cde->abde", "de"), ("abde,dec->abc", "c")
        self.query_dense = self._dense("query", *into, (dim,), heads)
        self.key_dense = self._dense(
            "key", *into, (context_dim,), shared, self.key_bias
        )
        self.value_dense = self._dense("value", *into, (context_dim,), shared)
        self.output_dense = self._dense("attention_output", *out_of, heads, (dim,))
        if self.query_key_norm is not None:
            self.query_norm.build((None, None, *heads))
            self.key_norm.build((None, None, *shared))
        if self.positions is not None and not self.positions.built:
            self.positions.build((None, None, *heads))
        if self.sinks:
            self.sink_logits = self.add_weight(
                name="sinks", shape=heads[:1], initializer="zeros", autocast=False
            )

    def _dense(self, name, equation, bias_axes, inputs, outputs, has_bias=True):
        dense = _layer.projection(
            self,
            keras.layers.EinsumDense,
            name,
            equation,
            output_shape=(None, *outputs),
            bias_axes=bias_axes if self.use_bias and has_bias else None,
            kernel=self.kernel_initializer.clone(),
            bias="zeros",
        )
        dense.supports_masking = True
        dense.build((None, None, *inputs))
        return dense

    def call(
        self,
        tokens: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
        start: int | Tensor = 0,
        training: bool | None = None,
    ) -> Any:
        context = tokens if context is None else context
        query = _layer.inner_call(self.query_dense, tokens)
        key = _layer.inner_call(self.key_dense, context)
        if self.query_key_norm is not None:
            query = _layer.inner_call(self.query_norm, query)
            key = _layer.inner_call(self.key_norm, key)
        if self.positions is not None:
            query, key = (self.positions(x, positions=positions) for x in (query, key))
        value = _layer.inner_call(self.value_dense, context)
        if cache is not None:
            key, value = (
                ops.slice_update(old, (0, start, 0, 0), ops.cast(new, old.dtype))
                for old, new in zip(cache, (key, value))
            )
        if mask is None:
            # Keras passes masks only to calls with a single tensor.
            mask = get_keras_mask(context)
        batch, num_queries, num_keys = query.shape[0], query.shape[1], key.shape[1]
        pairs = (batch, num_queries, num_keys)
        mask = _checks.check_mask("mask", mask, (batch, num_keys), pairs)
        by_pair = mask is not None and len(mask.shape) == 3
        mask = self._pairs(query, key, mask, start)
        attended = self._attend(query, key, value, mask, by_pair, training)
        outputs = _layer.inner_call(self.output_dense, attended)
        return outputs if cache is None else (outputs, (key, value))

    def _pairs(self, query, key, mask, start):
        """The pairs of tokens that attend, (B, N, M), (B, 1, M), (1, N, M) or None."""
        if mask is not None:
            mask = ops.cast(mask, "bool")
            mask = mask if len(mask.shape) == 3 else ops.expand_dims(mask, 1)
        if not self.causal:
            return mask
        ones = ops.ones((1, ops.shape(query)[1], ops.shape(key)[1]), "int32")
        earlier = ops.cumsum(ones, axis=1) + start >= ops.cumsum(ones, axis=2)
        return earlier if mask is None else ops.logical_and(mask, earlier)

    def _attend(self, query, key, value, mask, by_pair, training):
        # softmax(Q K^T / sqrt(key_dim)) V for each head. Query head h reads head
        # h // groups of the keys and values.
        scale = 1.0 / math.sqrt(self.key_dim)
        groups = self.num_heads // self.num_key_value_heads
        if self.compute_dtype == "float16" and not has_float16_attention():
            query, key, value = (ops.cast(x, "float32") for x in (query, key, value))
        is_torch = keras.backend.backend() == "torch"
        # Without a kernel of ours, Keras's form scales logits, and the one below scales
        # queries: language models, whose masks are of pairs, keep to the latter.
        has_form = has_own_attention(query) or not by_pair
        has_form = has_form and not self.sinks
        if has_form and not (training and self.dropout) and (groups == 1 or is_torch):
            if groups > 1:
                key, value = (ops.repeat(x, groups, axis=2) for x in (key, value))
            mask = None if mask is None else ops.expand_dims(mask, 1)
            flash = keras.config.is_flash_attention_enabled()
            if flash is None:
                outputs = attend(query, key, value, scale, mask)
            else:
                # The user has chosen a kernel, and Keras obeys.
                outputs = ops.dot_product_attention(
                    query, key, value, mask=mask, scale=scale, flash_attention=flash
                )
            return ops.cast(outputs, self.compute_dtype)
        # Here the queries of a group share its keys, which are not copied.
        num_queries = ops.shape(query)[1]
        split = (-1, num_queries, self.num_key_value_heads, groups, self.key_dim)
        query = ops.reshape(query * scale, split)
        logits = ops.cast(ops.einsum("bnkgd,bmkd->bkgnm", query, key), "float32")
        if mask is not None:
            logits = ops.where(ops.expand_dims(mask, (1, 2)), logits, -1e30)
        weights = ops.cast(self._weights_of(logits), value.dtype)
        weights = _layer.dropped_out(self.dropout_layer, weights, training)
        outputs = ops.einsum("bkgnm,bmkd->bnkgd", weights, value)
        outputs = ops.cast(outputs, self.compute_dtype)
        return ops.reshape(outputs, (-1, num_queries, self.num_heads, self.key_dim))

    def _weights_of(self, logits: Tensor) -> Tensor:
        """The softmax of logits (B, heads of keys, queries of each, N, M)."""
        if not self.sinks:
            return ops.softmax(logits, axis=-1)
        # A sink is one more logit, whose weight multiplies nothing.
        sinks = ops.reshape(self.sink_logits, (*logits.shape[1:3], 1, 1))
        sinks = ops.broadcast_to(sinks, (*ops.shape(logits)[:-1], 1))
        return ops.softmax(ops.concatenate([logits, sinks], axis=-1))[..., :-1]

    def compute_mask(self, tokens, previous_mask=None):
        # `mask` is of the keys.
        return get_keras_mask(tokens)

    def cache_shape(self, batch_size: int | Tensor | None, length: int) -> tuple:
        """The shape of the cached keys, and of the values."""
        return (batch_size, length, self.num_key_value_heads, self.key_dim)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        num_tokens, dim = shape
        shapes = {}
        for name in ("query", "key", "value"):
            heads = self.num_heads if name == "query" else self.num_key_value_heads
            shapes[f"{name}/kernel"] = (dim, heads, self.key_dim)
            if self.use_bias and (self.key_bias or name != "key"):
                shapes[f"{name}/bias"] = (heads, self.key_dim)
        shapes["attention_output/kernel"] = (self.num_heads, self.key_dim, dim)
        if self.use_bias:
            shapes["attention_output/bias"] = (dim,)
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.query_key_norm is not None:
            for norm in (self.query_norm, self.key_norm):
                in_head = norm.weight_shapes((num_tokens, self.key_dim))
                shapes.update(under(norm.name, in_head))
        return shapes

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        heads = 2 * self.num_heads + 2 * self.num_key_value_heads
        flops = 2 * num_tokens * dim * heads * self.key_dim
        # All pairs count, though causal attention masks half of them.
        flops += 4 * num_tokens * num_tokens * self.num_heads * self.key_dim
        return Cost.all_active(self.weight_shapes(shape), flops)


def check_key_value_heads(num_key_value_heads: int | None, num_heads: int) -> int:
    """Returns the number of heads of keys and values, which divides `num_heads`."""
    heads = num_heads if num_key_value_heads is None else num_key_value_heads
    if num_heads % _checks.check_integer("num_key_value_heads", heads):
        expected = f"num_key_value_heads to divide num_heads={num_heads}"
        raise _checks.unfit(expected, num_key_value_heads=num_key_value_heads)
    return heads
