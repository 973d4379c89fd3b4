"""A tower: embedding, blocks and final norm of one encoder.

Axes: B batch, N tokens, D hidden, E experts, P embedding, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe._checks import check_one_of, unfit
from keras_moe._types import DType, Tensor
from keras_moe.layers import (
    ClassToken,
    LayerNorm,
    MoEBlock,
    PatchEmbedding,
    PositionEmbedding,
    RegisterTokens,
    TextPositions,
    TokenEmbedding,
    TowerConfig,
    TowerSpec,
)
from keras_moe.layers.normalization import norm_layer
from keras_moe.layers.position_embedding import KINDS
from keras_moe.models.backbones.config import ImageConfig, TokenIdsConfig
from keras_moe.models.loading.blueprint import Part
from keras_moe.ops import Cost, Routing
from keras_moe.ops._initializers import PathInitializer
from keras_moe.routers import SoftRouter


class TowerOutputs(NamedTuple):
    """Outputs of a tower.

    Attributes:
        tokens: (B, N, D), after the final norm if there is one; (B, M N, D) for an
            ensemble of M members, in order.
        routing: dict from the name of a block or token mixer to `Routing`; those of
            an ensemble have the experts of all members that serve a patch.
        block_tokens: dict from block name to the tokens after it, (B, N, D).
        caches: dict from block name to its new cache, if it had one.
    """

    tokens: Tensor
    routing: dict
    block_tokens: dict
    caches: dict = {}


class Tower(NamedTuple):
    """The unbuilt layers of one encoder.

    A plain tuple, so that weights keep paths like `block_0/attention/query/kernel`.

    Attributes:
        embedding: layers from the input to tokens, in order.
        blocks: `Block` and `MoEBlock` layers, in order.
        final_norm: norm after the last block, or None.

    Example:

    >>> import keras
    >>> from keras_moe.layers import TowerSpec, PatchEmbedding, Attention
    >>> from keras_moe.models.backbones.tower import Tower
    >>> spec = TowerSpec(num_layers=2, num_tokens=4, mlp_dim=16)
    >>> blocks = spec.blocks(lambda index: Attention(num_heads=2, key_dim=4))
    >>> tower = Tower((PatchEmbedding(8, patch_size=4),), blocks)
    >>> tuple(tower(keras.Input((8, 8, 3))).tokens.shape)
    (None, 4, 8)
    """

    embedding: tuple[keras.layers.Layer, ...]
    blocks: tuple[keras.layers.Layer, ...]
    final_norm: keras.layers.Layer | None = None

    def __call__(
        self,
        inputs: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
    ) -> TowerOutputs:
        x = inputs
        for layer in self.embedding:
            x = layer(x)
        return self.encode(x, mask, modality_ids)

    def encode(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        boundaries: tuple[int, ...] = (),
        mixer_arguments: dict | None = None,
        caches: dict | None = None,
    ) -> TowerOutputs:
        """Applies the blocks and the final norm to embedded tokens.

        Args:
            tokens: (B, N, D).
            mask: optional booleans (B, N), False for padding.
            modality_ids: optional integers (B, N).
            boundaries: positions that cut examples into runs; attention is within runs.
            mixer_arguments: further arguments of all token mixers.
            caches: dict from block name to the cache of its token mixer.
        """
        x, optional = tokens, {"mask": mask, "modality_ids": modality_ids}
        fixed: dict[str, Any] = {k: v for k, v in optional.items() if v is not None}
        if boundaries:
            fixed["boundaries"] = tuple(boundaries)
        routing, block_tokens, new_caches, logits = {}, {}, {}, None
        before = 1
        for block, members in zip(self.blocks, self.members):
            if members > before:
                x, fixed = _repeated(x, members, mask)
            before = members
            arguments = dict(mixer_arguments or {})
            if caches is not None:
                arguments["cache"] = caches[block.name]
            own: dict[str, Any] = {"mixer_arguments": arguments} if arguments else {}
            is_moe = isinstance(block, MoEBlock)
            if is_moe and block.feed_forward.router.gating_residual:
                if logits is None:
                    zeros = ops.cast(ops.zeros_like(x[..., :1]), "float32")
                    count = block.feed_forward.router.num_experts
                    logits = ops.repeat(zeros, count, axis=-1)
                own["previous_logits"] = logits
            outputs = block(x, **own, **fixed)
            x, *records = outputs if isinstance(outputs, tuple) else (outputs,)
            if caches is not None:
                new_caches[block.name] = records.pop()
            if is_moe:
                routed, *mixer_records = records
                logits = routed.logits
                if members > 1:
                    routed = Routing(
                        *(_of_all_members(field, members) for field in routed)
                    )
                routing[block.name] = routed
                for record in mixer_records:
                    routing[f"{block.name}/token_mixer"] = record
            block_tokens[block.name] = x
        outputs = x if self.final_norm is None else self.final_norm(x)
        return TowerOutputs(outputs, routing, block_tokens, new_caches)

    def build_slots(self, max_length: int, dim: int) -> None:
        """Builds Soft MoE blocks for inputs of any length up to `max_length`."""
        for block in self.blocks:
            if isinstance(getattr(block.feed_forward, "router", None), SoftRouter):
                # Slots are weights, so their number follows from the maximum length.
                block.build((None, max_length, dim))

    @property
    def members(self) -> list[int]:
        """For each block, how many members of an ensemble run it."""
        counts = [1]
        for block in self.blocks:
            router = getattr(getattr(block, "feed_forward", None), "router", None)
            counts.append(max(counts[-1], getattr(router, "ensemble_size", 1)))
        return counts[1:]

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        norms = () if self.final_norm is None else (self.final_norm,)
        return (*self.embedding, *self.blocks, *norms)

    def parts(self, input_shape: tuple) -> tuple[list[Part], int, int]:
        """Parts with costs, N and D, for an input shape without batch axis."""
        shape, embedding = tuple(input_shape), Cost()
        for layer in self.embedding:
            embedding += layer_cost(layer, shape)
            shape = tuple(layer.compute_output_shape((None, *shape))[1:])
        kind = "patches" if len(input_shape) > 1 else "tokens"
        parts = [Part("embedding", kind, *embedding)]
        members = 1
        for block, members in zip(self.blocks, self.members):
            parts.append(block_part(block, shape).of_members(members))
        if self.final_norm is not None:
            part = Part("final_norm", "norm", *layer_cost(self.final_norm, shape))
            parts.append(part.of_members(members))
        return parts, *shape


def _repeated(tokens, members, mask):
    """Tokens (B, M N, D), the members' one after the other, and arguments of blocks."""
    length = tokens.shape[1]
    ids = ops.repeat(ops.arange(members, dtype="int32"), length)
    arguments = {
        "modality_ids": ops.zeros_like(tokens[..., 0], dtype="int32")[:, :1] + ids,
        "boundaries": tuple(range(length, members * length, length)),
    }
    if mask is not None:
        arguments["mask"] = ops.tile(mask, (1, members))
    return ops.tile(tokens, (1, members, 1)), arguments


def _of_all_members(field, members):
    """The members' experts side by side (B, N, E), from a field (B, M N, E)."""
    # The other members' experts are at 0, and their logits at minus infinity.
    shape = (-1, members, field.shape[1] // members, field.shape[2])
    return ops.max(ops.reshape(field, shape), axis=1)


def image_tower(
    config: ImageConfig,
    dtype: DType | None,
    token_mixer: Callable[[TowerSpec, int], keras.layers.Layer],
    final_norm: bool = True,
    **embedding: Any,
) -> Tower:
    """Creates the tower of an image backbone, unbuilt.

    Args:
        config: arguments of the backbone: its `config_class`, an `ImageConfig`.
        dtype: dtype policy.
        token_mixer: function of (`TowerSpec`, block index) that returns a layer.
        final_norm: whether to normalise the last block's tokens.
        **embedding: arguments of `image_embedding`, such as `class_token=True`.

    Example:

    >>> from keras_moe.layers import TokenMLP
    >>> from keras_moe.models import ImageConfig, image_tower
    >>> config = ImageConfig(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=1, mlp_dim=16
    ... )
    >>> tower = image_tower(config, None, lambda spec, index: TokenMLP(4))
    >>> [layer.name for layer in tower.layers]
    ['patch_embedding', 'embedding_dropout', 'block_0', 'final_norm']
    """
    if not isinstance(config, ImageConfig):
        names = (field.name for field in dataclasses.fields(ImageConfig))
        missing = [name for name in names if not hasattr(config, name)]
        expected = "a config_class that extends keras_moe.models.ImageConfig"
        raise unfit(expected, f"{type(config).__name__}, which lacks {missing}")
    layers, num_tokens = image_embedding(config, dtype, **embedding)
    spec = TowerSpec.of(config, num_tokens, dtype)
    return Tower(
        (*layers, embedding_dropout(config, dtype)),
        spec.blocks(lambda index: token_mixer(spec, index)),
        final_norm_layer(config, dtype) if final_norm else None,
    )


def image_embedding(
    config: ImageConfig,
    dtype: DType | None,
    *,
    padding: str = "valid",
    class_token: bool = False,
    register_tokens: int = 0,
    position_embedding: str | None = None,
    position_interpolation: str = "bilinear",
    norm: bool = False,
) -> tuple[tuple, int]:
    """Returns the unbuilt layers from images to tokens (without dropout), and N."""
    patches = PatchEmbedding(
        config.hidden_dim,
        config.patch_size,
        interpolation=position_interpolation,
        padding=padding,
        dtype=dtype,
        name="patch_embedding",
    )
    grid = patches.grid(config.image_shape)
    layers = [patches]
    if class_token:
        layers.append(ClassToken(dtype=dtype, name="class_token"))
    if position_embedding is not None:
        check_one_of("position_embedding", position_embedding, KINDS)
        positions = PositionEmbedding(
            grid,
            position_embedding,
            interpolation=position_interpolation,
            max_patches=getattr(config, "max_patches", None),
            dtype=dtype,
            name="position_embedding",
        )
        layers.append(positions)
    if register_tokens:
        first = int(class_token)
        layers.append(
            RegisterTokens(register_tokens, first, dtype=dtype, name="register_tokens")
        )
    if norm:
        layers.append(
            LayerNorm(config.layer_norm_epsilon, dtype=dtype, name="embedding_norm")
        )
    (num_patches, _) = patches.compute_output_shape((None, *config.example_shape))[1:]
    return tuple(layers), num_patches + int(class_token) + register_tokens


def image_inputs(config: ImageConfig) -> dict[str, Any]:
    """Symbolic images, or patches and grids of images of any shape."""
    shape = config.example_shape
    if len(shape) == 3:
        return {"images": keras.Input(shape, name="images")}
    return {
        "patches": keras.Input((None, shape[1]), name="patches"),
        "grids": keras.Input((2,), dtype="int32", name="grids"),
    }


def text_inputs() -> dict[str, Any]:
    return {
        "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
    }


def text_embedding(config: TokenIdsConfig, dtype: DType | None) -> tuple:
    """Returns the unbuilt layers from ids (B, N) to tokens, without dropout."""
    return (
        TokenEmbedding(
            config.vocabulary_size,
            config.hidden_dim,
            dtype=dtype,
            name="token_embedding",
        ),
        TextPositions(config.max_length, dtype=dtype, name="text_positions"),
    )


def embedding_dropout(config: TowerConfig, dtype: DType | None) -> keras.layers.Dropout:
    """Creates the dropout on embedded tokens, unbuilt."""
    return keras.layers.Dropout(
        config.dropout_rate,
        # The first of the encoder's sites.
        seed=config.seed,
        dtype=dtype,
        name="embedding_dropout",
    )


def final_norm_layer(config: TowerConfig, dtype: DType | None) -> keras.layers.Layer:
    """Creates the norm after the last block, unbuilt; it always has a scale."""
    return norm_layer(
        "rms" if config.norm == "plain_rms" else config.norm,
        config.layer_norm_epsilon,
        config.use_bias,
        dtype=dtype,
        name="final_norm",
    )


def embedding_projection(
    projection_dim: int | None,
    use_bias: bool = False,
    dtype: DType | None = None,
    name: str = "projection",
) -> keras.layers.Dense | None:
    """Creates a dense layer (B, D) -> (B, P), initialised as in CLIP."""
    if projection_dim is None:
        return None
    return keras.layers.Dense(
        projection_dim,
        use_bias=use_bias,
        # Standard deviation 1 / sqrt(D).
        kernel_initializer=PathInitializer(  # pyright: ignore[reportArgumentType]
            keras.initializers.VarianceScaling(1.0, "fan_in", "untruncated_normal"),
            f"{name}/kernel",
        ),
        dtype=dtype,
        name=name,
    )


class PooledProjection(NamedTuple):
    """A pooling layer and an optional projection, unbuilt."""

    pooling: keras.layers.Layer
    projection: keras.layers.Dense | None = None

    def __call__(self, tokens: Tensor, **arguments: object) -> Any:
        pooled = self.pooling(tokens, **arguments)
        return pooled if self.projection is None else self.projection(pooled)

    def parts(self, shape: tuple[int, int], prefix: str = "") -> list[Part]:
        parts, cost = [], self.pooling.cost(shape)
        if cost.parameters:
            parts.append(Part(f"{prefix}pooler", "MAP", *cost))
        if self.projection is not None:
            cost = layer_cost(self.projection, shape)
            parts.append(Part(f"{prefix}projection", "dense", *cost))
        return parts


def block_part(block: keras.layers.Layer, *shapes: tuple) -> Part:
    """The part of a block for an example with sequences (N, D) of these shapes."""
    costs = [layer_cost(block, shape) for shape in shapes]
    # Count the weights once, and the operations of all sequences.
    flops, routed = (sum(x) for x in zip(*(cost[2:] for cost in costs)))
    cost = costs[0]._replace(flops=flops, routed_flops=routed)
    part = Part(block.name, block_kind(block), *cost)
    if not isinstance(block, MoEBlock) or not routed:
        return part
    moe = block.feed_forward
    # Slots are what one expert is asked to do.
    slots = routed / moe.experts.cost((1, shapes[0][-1])).flops
    selected = getattr(moe.router, "num_selected_experts", None)
    return part._replace(
        num_experts=moe.experts.num_experts,
        selected_experts=selected or slots / sum(n for n, _ in shapes),
        tokens_per_expert=slots / moe.experts.num_experts,
    )


def block_kind(block: keras.layers.Layer) -> str:
    """Names a block for descriptions: "dense", or its experts and router."""
    if not isinstance(block, MoEBlock):
        return "dense"
    router = block.feed_forward.router
    types = router.expert_types._replace(ffn=len(router.expert_columns))
    shared = getattr(block.feed_forward, "shared_experts", None)
    also = "" if shared is None else " and shared"
    return f"MoE {types}{also}, {router.summary}"


def layer_cost(layer: keras.layers.Layer, shape: tuple) -> Cost:
    """The cost of an unbuilt layer; without a `cost` method, only its parameters."""
    if hasattr(layer, "cost"):
        return layer.cost(shape)
    if isinstance(layer, keras.layers.Dense):
        return Cost.of_dense(shape[-1], layer.units, layer.use_bias)
    copy = type(layer).from_config(layer.get_config())
    copy.build((None, *shape))
    return Cost.all_active({w.path: tuple(w.shape) for w in copy.trainable_weights})
