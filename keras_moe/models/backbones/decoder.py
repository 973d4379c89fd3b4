"""A language model's backbone: a causal transformer, dense or with experts.

Axes: B batch, N tokens, M tokens with the cached ones, D hidden, H mlp, V vocabulary.
"""

import dataclasses
from typing import Any

import keras
import keras_hub
from keras import ops

from keras_moe import _checks
from keras_moe._types import DType, Tensor
from keras_moe.layers import (
    Attention,
    CausalMask,
    MoEConfig,
    ReversibleTokenEmbedding,
    TextPositions,
    TowerSpec,
)
from keras_moe.models.backbones.base import MoEBackbone, ReadsTexts
from keras_moe.models.backbones.config import TransformerConfig, VocabularyConfig, takes
from keras_moe.models.backbones.tower import (
    Tower,
    TowerOutputs,
    embedding_dropout,
    final_norm_layer,
    text_inputs,
)
from keras_moe.models.base._input_checks import check_texts
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.registry import register_backbone
from keras_moe.routers import SoftmaxAffinity, TokenChoiceRouter
from keras_moe.routers.affinities import get as affinity_of

POSITIONS = ("rotary", "learned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig, VocabularyConfig):
    """Arguments of `DecoderBackbone`."""

    positions: str = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0
    tied_embeddings: bool = False
    # LLaMA's parts.
    initialization: Any = "llama"
    norm: str = "rms"
    gated_mlp: bool = True
    use_bias: bool = False
    activation: Any = "silu"
    mlp_dim: int = 2048
    vocabulary_size: int = 65536
    max_length: int = 2048

    def __post_init__(self):
        super().__post_init__()
        _checks.check_one_of("positions", self.positions, POSITIONS)
        _checks.check_positive("rope_theta", self.rope_theta)
        _checks.check_positive("rope_scaling", self.rope_scaling)
        _checks.check_bool("tied_embeddings", self.tied_embeddings)
        size = self.head_dim or _checks.head_size(self.num_heads, self.hidden_dim)
        if self.positions == "rotary" and size % 2:
            expected = "heads of an even size for rotary positions"
            raise _checks.unfit(
                expected, num_heads=self.num_heads, hidden_dim=self.hidden_dim
            )
        if isinstance(self.moe, MoEConfig):
            check_causal(self.moe)

    def attention(self, spec: TowerSpec, index: int, **arguments: Any) -> Attention:
        if self.positions == "rotary":
            arguments["positions"] = keras_hub.layers.RotaryEmbedding(
                self.rope_theta,  # pyright: ignore[reportArgumentType]
                self.rope_scaling,
                dtype=spec.dtype,
                name="rotary_embedding",
            )
        return super().attention(
            spec,
            index,
            query_key_norm=self.norm if self.query_key_norm is True else None,
            **arguments,
        )


def check_causal(moe):
    """Refuses routers by which a token's output depends on later ones at inference."""
    # In training a capacity does the same, which is what the papers do.
    arguments, received = moe.router_arguments, f"router={moe.router!r}"
    if not issubclass(moe.router_class, TokenChoiceRouter):
        raise ValueError(
            "Expected a token choice router, since expert choice and soft routing let "
            f"a token look ahead in its sequence; received: {received}"
        )
    if not isinstance(affinity_of(arguments["affinity"]), SoftmaxAffinity):
        raise ValueError(
            "Expected affinity='softmax', since transport plans let a token look ahead "
            f"in its sequence; received: {received}"
        )
    names = ("eval_capacity_factor", "eval_capacity")
    limits = [arguments[name] for name in names if arguments.get(name) is not None]
    if limits or arguments["evaluation"] == "official":
        raise ValueError(
            "Expected evaluation='batch_invariant' without a capacity at inference, "
            f"where tokens are generated one at a time; received: {received}"
        )
    if moe.modality_count is not None:
        raise _checks.unfit("a router without modalities for texts", received)


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class DecoderBackbone(ReadsTexts, MoEBackbone):
    """A causal transformer for language models, dense or with mixtures of experts.

    The defaults are LLaMA's parts. With `moe=MoEConfig(...)` its feed-forward layers
    are V-MoE's or MoE++'s mixtures, with `MuMoEConfig(...)` muMoE's. `CausalLM` trains
    it and generates text. `routing` and `features` work as in `ViTBackbone`.

    Args:
        vocabulary_size: V, the number of token ids.
        max_length: maximum text length N, special tokens included.
        positions: `"rotary"`, in the attention, or `"learned"`, added to the tokens.
        rope_theta: base of the rotary positions' wavelengths.
        rope_scaling: factor by which rotary positions are divided.
        tied_embeddings: whether logits use the matrix of the token embeddings.
        query_key_norm: whether to normalise queries and keys per head, by `norm`.
        moe: `MoEConfig`, `MuMoEConfig` or a dict of fields; None for a dense model.
            Experts are chosen by each token on its own: routers that look at the
            other tokens of a sequence would look ahead, and are refused. So does a
            capacity in training, which is allowed as in the papers: with K=2 or a
            `priority` other than `"first_come"`, a token may lose its slot to a later
            one. `dropless=True` avoids it.
        **kwargs: arguments of `TransformerConfig` and `MoEBackbone`.

    Input shape: dict of `"token_ids"`, integers (B, N) with N up to `max_length`, and
    `"padding_mask"`, (B, N): 0 or False for padding. Several documents in a row have
    the numbers 1, 2, ... there, and do not attend to each other.

    Output shape: (B, N, D), normalised. `logits` turns them into (B, N, V).

    Reference: *LLaMA: Open and Efficient Foundation Language Models*; *MoE++*;
    *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> from keras_moe.models import DecoderBackbone
    >>> backbone = DecoderBackbone(
    ...     vocabulary_size=20, max_length=6, hidden_dim=8, num_layers=2, num_heads=2,
    ...     mlp_dim=16, moe={"moe_layers": [1], "num_experts": 4},
    ... )
    >>> ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19]])
    >>> tokens = backbone({"token_ids": ids, "padding_mask": ids != 0})
    >>> tuple(backbone.logits(tokens).shape)
    (2, 4, 20)
    >>> list(backbone.routing)
    ['block_1']
    """

    config_class = DecoderConfig
    example = "text"
    pipeline_tag = "text-generation"

    @takes(DecoderConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @classmethod
    def tower(cls, config: DecoderConfig, dtype: DType | None = None) -> Tower:
        spec = TowerSpec.of(config, config.max_length, dtype)
        embedding = ReversibleTokenEmbedding(
            config.vocabulary_size,
            config.hidden_dim,
            config.tied_embeddings,
            dtype=dtype,
            name="token_embedding",
        )
        layers = [embedding]
        if config.positions == "learned":
            layers.append(
                TextPositions(config.max_length, dtype=dtype, name="text_positions")
            )
        return Tower(
            (*layers, embedding_dropout(config, dtype)),
            spec.blocks(lambda index: config.attention(spec, index)),
            final_norm_layer(config, dtype),
        )

    @classmethod
    def _functional(cls, config, dtype):
        tower, inputs = cls.tower(config, dtype), text_inputs()
        documents = keras.Input((None,), dtype="int32", name="padding_mask")
        inputs["padding_mask"] = documents
        mask, positions = CausalMask(dtype=dtype, name="causal_mask")(documents)
        encoded = _encoded(tower, inputs["token_ids"], mask, positions, documents != 0)
        return inputs, encoded.tokens, encoded

    @property
    def token_embedding(self) -> ReversibleTokenEmbedding:
        """The token embedding, under the name KerasHub's language models use."""
        return self.get_layer("token_embedding")

    @property
    def features(self) -> dict:
        """`"tokens"`, and the tokens after each block (B, N, D) as `"block_0"`..."""
        return {"tokens": self.output, **self._block_tokens}

    def logits(self, tokens: Tensor) -> Any:
        """Returns the logits (B, N, V) of the backbone's outputs."""
        return self.token_embedding(tokens, reverse=True)

    def empty_cache(self, padding_mask: Tensor) -> dict:
        """Returns a cache without tokens, for `call_with_cache`.

        It is a dict of the `"padding_mask"` and of each block's keys and values.

        Args:
            padding_mask: (B, M), as the backbone's input, for all tokens to come.
        """
        padding_mask = ops.cast(padding_mask, "int32")
        _checks.check_integer("length", padding_mask.shape[1], maximum=self.max_length)
        cache: dict[str, Any] = {"padding_mask": padding_mask}
        for name in self.block_names:
            mixer = self.get_layer(name).token_mixer
            shape = mixer.cache_shape(*ops.shape(padding_mask))
            cache[name] = tuple(ops.zeros(shape, mixer.compute_dtype) for _ in range(2))
        return cache

    def call_with_cache(
        self, token_ids: Tensor, cache: dict, start: Tensor | int
    ) -> tuple[Any, dict]:
        """Encodes the tokens that follow those in the cache.

        Args:
            token_ids: integers (B, N), the ids from position `start` on.
            cache: result of `empty_cache` or of the call before.
            start: index of the first of these tokens.

        Returns: The outputs (B, N, D), equal to those of the whole sequence, and the
        cache with these tokens.
        """
        self._check_cache(token_ids, cache, start)
        # A nested argument of layers has tensors only.
        start = ops.cast(start, "int32")
        documents, length = cache["padding_mask"], token_ids.shape[1]
        mask, positions = self.get_layer("causal_mask")(
            documents, start=start, num_queries=length
        )
        is_token = ops.take(documents, start + ops.arange(length), axis=1) != 0
        names = ["token_embedding", "text_positions", "embedding_dropout"]
        if self.config.positions != "learned":
            names.remove("text_positions")
        embedding = tuple(self.get_layer(name) for name in names)
        blocks = tuple(self.get_layer(name) for name in self.block_names)
        tower = Tower(embedding, blocks, self.get_layer("final_norm"))
        encoded = _encoded(tower, token_ids, mask, positions, is_token, cache, start)
        return encoded.tokens, {"padding_mask": documents, **encoded.caches}

    def _check_cache(self, token_ids, cache, start):
        names = ["padding_mask", *self.block_names]
        if not isinstance(cache, dict) or set(cache) != set(names):
            raise ValueError(
                f"Expected a cache of empty_cache, with {names}; received: "
                f"{sorted(cache) if isinstance(cache, dict) else type(cache)}"
            )
        batch_size, length = token_ids.shape
        capacity = cache["padding_mask"].shape[1]
        mixer = self.get_layer("block_0").token_mixer
        expected = mixer.cache_shape(batch_size, capacity)
        shapes = [tuple(x.shape) for name in names[1:] for x in cache[name]]
        fits = all(_checks.fits_shape(shape, expected) for shape in shapes)
        fits = fits and _checks.fits_shape(cache["padding_mask"].shape, expected[:2])
        last = (start if isinstance(start, int) else 0) + length
        if not fits or (capacity is not None and last > capacity):
            raise ValueError(
                "Expected a cache for this batch, with room for all tokens; received: "
                f"start={start}, token_ids.shape={tuple(token_ids.shape)}, a cache of "
                f"{shapes[0][:2]}"
            )

    def _check_inputs(self, inputs, labels=None):
        check_texts(inputs, self.vocabulary_size, self.max_length)

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        parts, num_tokens, dim = cls.tower(config, "float32").parts(
            (config.max_length,)
        )
        # The matrix is counted in the embedding, tied or not.
        flops = 2 * num_tokens * dim * config.vocabulary_size
        return [*parts, Part("logits", "dense", 0, 0, flops)], num_tokens, dim


def _encoded(
    tower, token_ids, mask, positions, is_token, cache=None, start=None
) -> TowerOutputs:
    """The tower's outputs; `is_token` is False for padding, which is not routed."""
    x = token_ids
    for layer in tower.embedding:
        is_position = isinstance(layer, TextPositions)
        x = layer(x, positions) if is_position else layer(x)
    arguments = {"mask": mask, "positions": positions}
    if cache is not None:
        arguments["start"] = start
    return tower.encode(x, is_token, mixer_arguments=arguments, caches=cache)
