"""A tower: embedding, blocks and last norm of one encoder.

Axes: B batch, N tokens, D hidden, E experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_moe.checks import (
    check_bool,
    check_dropout,
    check_image_shape,
    check_integer,
    check_one_of,
    check_seed,
)
from keras_moe.layers import (
    AttentionPooling,
    ClassToken,
    EncoderSpec,
    LayerNorm,
    MaskedPooling,
    MoEEncoderBlock,
    PatchEmbedding,
    PositionEmbedding,
    TextPositions,
    TokenEmbedding,
    moe_config,
)
from keras_moe.layers.masked_pooling import MASKED_POOLINGS
from keras_moe.layers.position_embedding import KINDS
from keras_moe.models.description import Part
from keras_moe.ops import Cost
from keras_moe.ops.initializers import FastInitializer

# The settings of an encoder that are arguments of its backbone.
_SETTINGS = (
    "num_layers",
    "mlp_dim",
    "activation",
    "dropout_rate",
    "stochastic_depth",
    "layer_norm_epsilon",
    "rematerialize",
    "seed",
)


class TowerOutputs(NamedTuple):
    """The results of a tower.

    Attributes:
        tokens: (B, N, D), normalised if the tower has a last norm.
        routing: `Routing` of each MoE block by the block's name; a token mixer with
            experts has a record of its own, with channels (B, D, E), such as
            "block_0/token_mixer".
        block_tokens: (B, N, D) behind each block by its name.
    """

    tokens: Any
    routing: dict
    block_tokens: dict


class Tower(NamedTuple):
    """The layers of one encoder, not built.

    It is a plain tuple and no layer, so that a model's weights keep their public paths,
    such as `block_0/attention/query/kernel`.

    Attributes:
        embedding: layers from the input to tokens, in order.
        blocks: `EncoderBlock` and `MoEEncoderBlock` layers, in order.
        final_norm: layer on the last block's tokens, or None.

    Example:

    >>> import keras
    >>> from keras_moe.layers import EncoderSpec, PatchEmbedding, SelfAttention
    >>> from keras_moe.models.tower import Tower
    >>> spec = EncoderSpec(num_layers=2, num_tokens=4, mlp_dim=16)
    >>> blocks = spec.blocks(lambda index: SelfAttention(num_heads=2, key_dim=4))
    >>> tower = Tower((PatchEmbedding(8, patch_size=4),), blocks)
    >>> tuple(tower(keras.Input((8, 8, 3))).tokens.shape)
    (None, 4, 8)
    """

    embedding: tuple[keras.layers.Layer, ...]
    blocks: tuple[keras.layers.Layer, ...]
    final_norm: keras.layers.Layer | None = None

    def __call__(
        self, inputs: Any, mask: Any = None, modality_ids: Any = None
    ) -> TowerOutputs:
        """Runs the tower."""
        x = inputs
        for layer in self.embedding:
            x = layer(x)
        return self.encode(x, mask, modality_ids)

    def encode(
        self,
        tokens: Any,
        mask: Any = None,
        modality_ids: Any = None,
        boundaries: tuple[int, ...] = (),
    ) -> TowerOutputs:
        """Runs the blocks and the last norm on tokens that are embedded.

        Args:
            tokens: (B, N, D).
            mask: boolean (B, N), False for padding, or None.
            modality_ids: integers (B, N), or None.
            boundaries: places at which the tokens of an example are cut: they attend
                within their own run only.
        """
        if modality_ids is None:
            self._check_one_modality()
        x = tokens
        fixed = {"mask": mask, "modality_ids": modality_ids}
        fixed = {name: value for name, value in fixed.items() if value is not None}
        if boundaries:
            fixed["boundaries"] = tuple(boundaries)
        routing, block_tokens, logits = {}, {}, None
        for block in self.blocks:
            if isinstance(block, MoEEncoderBlock):
                has_residual = block.feed_forward.router.gating_residual
                residual = {"previous_logits": logits} if has_residual else {}
                x, routing[block.name], *mixer_records = block(x, **residual, **fixed)
                for record in mixer_records:
                    routing[f"{block.name}/token_mixer"] = record
                logits = routing[block.name].logits
            else:
                x = block(x, **fixed)
            block_tokens[block.name] = x
        outputs = x if self.final_norm is None else self.final_norm(x)
        return TowerOutputs(outputs, routing, block_tokens)

    def _check_one_modality(self):
        for block in self.blocks:
            router = getattr(block.feed_forward, "router", None)
            if getattr(router, "modality_count", None) is not None:
                raise ValueError(
                    "Expected num_modalities=None, expert_pools=None and no priority "
                    "by modality for an encoder whose tokens are of one modality, or "
                    "modality_ids; received: modality_ids=None, num_modalities="
                    f"{router.num_modalities}, expert_pools={router.expert_pools}, "
                    f"priority={getattr(router, 'priority', None)!r}"
                )

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        """All layers in order."""
        norms = () if self.final_norm is None else (self.final_norm,)
        return (*self.embedding, *self.blocks, *norms)

    def parts(self, input_shape: tuple) -> tuple[list[Part], int, int]:
        """The parts with their costs, the number of tokens N, and D.

        Args:
            input_shape: shape of one input without the batch's axis: (height, width,
                channels) of images, (num_tokens,) of texts.
        """
        shape, embedding = tuple(input_shape), Cost()
        for layer in self.embedding:
            embedding += layer_cost(layer, shape)
            shape = tuple(layer.compute_output_shape((None, *shape))[1:])
        kind = "patches" if len(input_shape) == 3 else "tokens"
        parts = [Part("embedding", kind, *embedding)]
        for block in self.blocks:
            kind = block_kind(block)
            parts.append(Part(block.name, kind, *layer_cost(block, shape)))
        if self.final_norm is not None:
            parts.append(
                Part("final_norm", "norm", *layer_cost(self.final_norm, shape))
            )
        return parts, *shape


def encoder_spec(config: dict, num_tokens: int, dtype: Any) -> EncoderSpec:
    """The settings of an encoder's blocks, from the arguments of its backbone."""
    settings = {name: config[name] for name in _SETTINGS}
    moe = moe_config(config["moe"])
    return EncoderSpec(num_tokens=num_tokens, moe=moe, dtype=dtype, **settings)


def block_kind(block: keras.layers.Layer) -> str:
    """Kind of a block for descriptions: "dense", or its experts and router."""
    if not isinstance(block, MoEEncoderBlock):
        return "dense"
    router = block.feed_forward.router
    return f"MoE {router.expert_types}, {router.summary}"


def embedding_dropout(config: dict, dtype: Any) -> keras.layers.Dropout:
    """The dropout on an encoder's embedded tokens, not built."""
    return keras.layers.Dropout(
        check_dropout("dropout_rate", config["dropout_rate"]),
        # The first of the encoder's sites.
        seed=config["seed"],
        dtype=dtype,
        name="embedding_dropout",
    )


def layer_cost(layer: keras.layers.Layer, shape: tuple) -> Cost:
    """The cost of a layer that is not built.

    A layer without a method `cost`, such as one of Keras, is built as a copy: its
    parameters count, but no FLOPs.
    """
    if hasattr(layer, "cost"):
        return layer.cost(shape)
    copy = type(layer).from_config(layer.get_config())
    copy.build((None, *shape))
    return Cost.all_active({w.path: tuple(w.shape) for w in copy.trainable_weights})


def embedding_projection(
    projection_dim: int,
    use_bias: bool = False,
    dtype: Any = None,
    name: str = "projection",
) -> keras.layers.Dense:
    """A dense layer from (B, D) to (B, P), not built, drawn as in CLIP."""
    return keras.layers.Dense(
        check_integer("projection_dim", projection_dim),
        use_bias=check_bool("projection_bias", use_bias),
        # A standard deviation of 1 / sqrt(D).
        kernel_initializer=FastInitializer(
            keras.initializers.VarianceScaling(1.0, "fan_in", "untruncated_normal")
        ),
        dtype=dtype,
        name=name,
    )


_SWITCHES = ("class_token", "embedding_norm", "final_norm")


def image_tower(
    config: dict,
    dtype: Any,
    token_mixer: Callable[[EncoderSpec, int], keras.layers.Layer],
) -> Tower:
    """The tower of a backbone of images, not built."""
    # Before seeds and layers are made of it.
    check_seed("seed", config["seed"])
    embedding, num_tokens = image_embedding(config, dtype)
    embedding += (embedding_dropout(config, dtype),)
    spec = encoder_spec(config, num_tokens, dtype)
    blocks = spec.blocks(lambda index: token_mixer(spec, index))
    final_norm = None
    if config.get("final_norm", True):
        epsilon = config["layer_norm_epsilon"]
        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
    return Tower(embedding, blocks, final_norm)


def image_embedding(config: dict, dtype: Any) -> tuple[tuple, int]:
    """The layers from images to tokens but dropout, not built, and the tokens'
    number.
    """
    image_shape = check_image_shape(config["image_shape"])
    hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
    for name in _SWITCHES:
        check_bool(name, config.get(name, False))
    epsilon = config["layer_norm_epsilon"]
    interpolation = config.get("position_interpolation", "bilinear")
    patches = PatchEmbedding(
        hidden_dim,
        config["patch_size"],
        interpolation=interpolation,
        padding=config.get("patch_padding", "valid"),
        dtype=dtype,
        name="patch_embedding",
    )
    rows, columns = patches.grid(image_shape)
    has_class_token = config.get("class_token", False)
    embedding = [patches]
    if has_class_token:
        embedding.append(ClassToken(dtype=dtype, name="class_token"))
    if config.get("position_embedding") is not None:
        check_one_of("position_embedding", config["position_embedding"], KINDS)
        embedding.append(
            PositionEmbedding(
                (rows, columns),
                config["position_embedding"],
                interpolation=interpolation,
                dtype=dtype,
                name="position_embedding",
            )
        )
    if config.get("embedding_norm", False):
        embedding.append(LayerNorm(epsilon, dtype=dtype, name="embedding_norm"))
    return tuple(embedding), rows * columns + int(has_class_token)


TEXT_POOLINGS = (*MASKED_POOLINGS, "map")


def text_embedding(config: dict, dtype: Any) -> tuple:
    """The layers from token ids (B, N) to tokens (B, N, D) but dropout, not built."""
    return (
        TokenEmbedding(
            config["vocabulary_size"],
            config["hidden_dim"],
            dtype=dtype,
            name="token_embedding",
        ),
        TextPositions(config["max_length"], dtype=dtype, name="text_positions"),
    )


def text_tower(
    config: dict,
    dtype: Any,
    token_mixer: Callable[[EncoderSpec, int], keras.layers.Layer],
) -> Tower:
    """The tower of a backbone of texts, not built."""
    # Before seeds and layers are made of it.
    check_seed("seed", config["seed"])
    max_length = check_integer("max_length", config["max_length"])
    spec = encoder_spec(config, max_length, dtype)
    final_norm = None
    if check_bool("final_norm", config.get("final_norm", True)):
        epsilon = config["layer_norm_epsilon"]
        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
    embedding = (*text_embedding(config, dtype), embedding_dropout(config, dtype))
    blocks = spec.blocks(lambda index: token_mixer(spec, index))
    return Tower(embedding, blocks, final_norm)


class TextPooler(NamedTuple):
    """The layers from a text's tokens to one vector, not built.

    Attributes:
        pooling: `MaskedPooling` or `AttentionPooling`.
        projection: dense layer on the pooled vector, or None.
    """

    pooling: keras.layers.Layer
    projection: keras.layers.Dense | None = None

    def __call__(self, tokens: Any, mask: Any = None, token_ids: Any = None) -> Any:
        """Pools tokens."""
        arguments = {} if mask is None else {"mask": mask}
        if getattr(self.pooling, "pooling", None) == "end_of_text":
            arguments["token_ids"] = token_ids
        pooled = self.pooling(tokens, **arguments)
        return pooled if self.projection is None else self.projection(pooled)

    def parts(self, shape: tuple[int, int]) -> list[Part]:
        """The parts with their costs."""
        parts, cost = [], self.pooling.cost(shape)
        if cost.parameters:
            parts.append(Part("pooler", "MAP", *cost))
        if self.projection is not None:
            dense = self.projection
            cost = Cost.of_dense(shape[-1], dense.units, dense.use_bias)
            parts.append(Part("projection", "dense", *cost))
        return parts


def text_pooler(config: dict, dtype: Any) -> TextPooler:
    """The pooling and the projection of a backbone of texts, not built."""
    pooling = check_one_of("pooling", config["pooling"], TEXT_POOLINGS)
    end_of_text_id = config["end_of_text_id"]
    if end_of_text_id is not None:
        check_integer("end_of_text_id", end_of_text_id, 0)
        if end_of_text_id >= config["vocabulary_size"]:
            raise ValueError(
                "Expected end_of_text_id below vocabulary_size="
                f"{config['vocabulary_size']}; received: "
                f"end_of_text_id={end_of_text_id}"
            )
    if pooling == "map":
        if end_of_text_id is not None:
            raise ValueError(
                "Expected end_of_text_id=None for pooling='map'; received: "
                f"end_of_text_id={end_of_text_id}"
            )
        pooler = AttentionPooling(
            config["num_heads"],
            config["mlp_dim"],
            activation=config["activation"],
            layer_norm_epsilon=config["layer_norm_epsilon"],
            dtype=dtype,
            name="pooler",
        )
    else:
        pooler = MaskedPooling(pooling, end_of_text_id, dtype=dtype, name="pooler")
    use_bias = check_bool("projection_bias", config["projection_bias"])
    if config["projection_dim"] is None:
        if use_bias:
            raise ValueError(
                "Expected projection_dim beside projection_bias=True; received: "
                "projection_dim=None"
            )
        return TextPooler(pooler)
    projection = embedding_projection(config["projection_dim"], use_bias, dtype)
    return TextPooler(pooler, projection)
