"""A tower: embedding, blocks and last norm of one encoder.

Axes: B batch, N tokens, D hidden, E experts.
"""

from typing import Any, NamedTuple

import keras

from keras_moe.checks import check_dropout
from keras_moe.layers import EncoderSpec, MoEEncoderBlock, moe_config
from keras_moe.models.description import Part
from keras_moe.ops import Cost

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
