"""One transformer for images and texts, whose experts serve both.

Axes: B batch, N tokens (images' before texts'), D hidden, P embedding.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool, check_integer, check_seed, head_size
from keras_moe.layers import (
    LayerNorm,
    LogitScale,
    MaskedPooling,
    MoEConfig,
    SelfAttention,
    moe_config,
)
from keras_moe.losses import check_modalities
from keras_moe.models.description import Part
from keras_moe.models.overrides import complete_config
from keras_moe.models.pair_backbone import (
    MODALITIES,
    PairBackbone,
    plain_temperature,
    text_inputs,
)
from keras_moe.models.registry import register_backbone
from keras_moe.models.tower import (
    Tower,
    TowerOutputs,
    block_kind,
    embedding_dropout,
    embedding_projection,
    encoder_spec,
    image_embedding,
    layer_cost,
    text_embedding,
)
from keras_moe.ops import Cost, Routing
from keras_moe.routers import SoftRouter


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class LIMoEBackbone(PairBackbone):
    """One transformer for images and texts, which share blocks and experts.

    Patches and token ids are embedded, each with learned positions; then all blocks
    are shared. Tokens attend within their own example and modality only, and each MoE
    layer routes the tokens of a group's images and texts together, in one call. Each
    modality's tokens are averaged and projected. The defaults are LIMoE-B/32, but for
    its experts, which `moe` adds: without, it is the dense one-tower model.

    Routers tell modalities apart by ids, 0 for images and 1 for texts, if `moe` says
    so: `num_modalities=2` gives each a kernel of its own, `expert_pools` experts of its
    own (appendix E.3), and `priority` says which tokens a full expert serves: those of
    the largest gates (appendix E.1), `[0, 1]` images first, `[1, 0]` texts first, or
    `"shuffled"` (figure 6).

    The published text is without these points, which are this library's own: padding is
    like any other token unless `mask_padding`, dropout and pre-norms are as in ViT, and
    a last norm comes before the average, as in ViT, with the same weights for both
    modalities.

    Args:
        image_shape: (height, width, channels).
        patch_size: size of a patch, an int or (height, width). Images of which it is no
            divisor get zeros around them: 288 pixels are 21 patches of 14.
        vocabulary_size: V, the number of token ids.
        max_length: N of the longest text, its special tokens included.
        hidden_dim: D.
        num_layers: number of blocks.
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: H.
        projection_dim: P.
        mask_padding: whether no token attends to padding, which is neither routed nor
            averaged. The paper routes it. In both cases a text has at least one token
            that is no padding.
        activation: activation of the feed-forward layers.
        dropout_rate: dropout rate on embeddings, attention outputs and dense
            feed-forward layers.
        attention_dropout: dropout rate on attention weights.
        stochastic_depth: drop rate of the last block, to which the rate grows linearly
            from 0 at the first block; see `keras_moe.layers.EncoderBlock`.
        layer_norm_epsilon: epsilon of all normalisations.
        temperature: scale of the similarities at the start, its bound, and their bias;
            see `CLIPBackbone`.
        moe: `MoEConfig`, or a dict of its fields: which blocks are mixtures of experts,
            and of what; None for a dense model.
        rematerialize: whether training keeps only the blocks' inputs for the gradient:
            less memory, more time; see `keras_moe.layers.EncoderBlock`.
        seed: seed of noise, dropout and stochastic depth, each site with one of its own
            that follows from it; weights draw from Keras's global seed.
        dtype: dtype policy; routing and embeddings are float32 under each.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        A dict: `"images"` (B, height, width, channels), `"token_ids"`, integers (B, N),
        N up to `max_length`, and `"padding_mask"`, boolean or integers (B, N), False
        for padding.

    Output shape:
        A dict: `"image_embeddings"` and `"text_embeddings"`, unit vectors, float32
        (B, P).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together, or
            for soft routing, which would mix images with texts.

    Reference:
        *Multimodal Contrastive Learning with LIMoE: the Language-Image Mixture of
        Experts*, section 2 and appendices A, B and E, table 4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import LIMoEBackbone
    >>> backbone = LIMoEBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, vocabulary_size=20, max_length=6,
    ...     hidden_dim=8, num_layers=2, num_heads=2, mlp_dim=16, projection_dim=4,
    ...     moe={"num_experts": 4, "num_selected_experts": 1},
    ... )
    >>> token_ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19]])
    >>> pairs = {
    ...     "images": np.zeros((2, 8, 8, 3)), "token_ids": token_ids,
    ...     "padding_mask": token_ids != 0,
    ... }
    >>> {k: tuple(v.shape) for k, v in backbone(pairs).items()}
    {'image_embeddings': (2, 4), 'text_embeddings': (2, 4)}
    >>> list(backbone.routing)
    ['image/block_1', 'text/block_1']
    """

    def __init__(
        self,
        image_shape: tuple = (224, 224, 3),
        patch_size: Any = 32,
        vocabulary_size: int = 32000,
        max_length: int = 16,
        hidden_dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        mlp_dim: int = 3072,
        projection_dim: int = 512,
        mask_padding: bool = False,
        activation: Any = "gelu_tanh",
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        temperature: Any = "limoe",
        moe: Any = None,
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        super().__init__(
            {
                "image_shape": image_shape,
                "patch_size": patch_size,
                "vocabulary_size": vocabulary_size,
                "max_length": max_length,
                "hidden_dim": hidden_dim,
                "num_layers": num_layers,
                "num_heads": num_heads,
                "mlp_dim": mlp_dim,
                "projection_dim": projection_dim,
                "mask_padding": mask_padding,
                "activation": activation,
                "dropout_rate": dropout_rate,
                "attention_dropout": attention_dropout,
                "stochastic_depth": stochastic_depth,
                "layer_norm_epsilon": layer_norm_epsilon,
                "temperature": temperature,
                "moe": moe,
                "rematerialize": rematerialize,
                "seed": seed,
            },
            dtype=dtype,
            **kwargs,
        )

    @classmethod
    def _checked_sizes(cls, config):
        names = ("vocabulary_size", "max_length", "projection_dim")
        return {
            **super()._checked_sizes(config),
            **{name: check_integer(name, config[name]) for name in names},
            "temperature": plain_temperature(config["temperature"]),
        }

    @classmethod
    def _plain_config(cls, config):
        config = super()._plain_config(config)
        moe = moe_config(config["moe"])
        count = getattr(moe, "modality_count", None)
        if count not in (None, len(MODALITIES)):
            raise ValueError(
                f"Expected a moe for {len(MODALITIES)} modalities, images and texts; "
                f"received: one for {count}"
            )
        if isinstance(moe, MoEConfig) and moe.auxiliary_losses != "auto":
            check_modalities(moe.auxiliary_losses, len(MODALITIES))
        return config

    @classmethod
    def tower(cls, config: dict, dtype: Any = None) -> Tower:
        check_seed("seed", config["seed"])
        hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
        key_dim = head_size(config["num_heads"], hidden_dim)
        _, num_patches = image_embedding(_padded(config), dtype)
        max_length = check_integer("max_length", config["max_length"])
        spec = encoder_spec(config, num_patches + max_length, dtype)
        epsilon = config["layer_norm_epsilon"]

        def attention(index):
            return SelfAttention(
                config["num_heads"],
                key_dim,
                layer_norm_epsilon=epsilon,
                dropout=config["attention_dropout"],
                # A seed of its own: both dropouts would drop alike otherwise.
                seed=spec.seed_of(index, 1),
                dtype=dtype,
                name="attention",
            )

        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
        blocks = spec.blocks(attention)
        for block in blocks:
            if isinstance(getattr(block.feed_forward, "router", None), SoftRouter):
                raise ValueError(
                    "Expected a router that sends each token to experts, since soft "
                    "routing would mix images with texts; received: "
                    f"router={block.feed_forward.router.summary!r}"
                )
        # Each modality has an embedding of its own, before this tower.
        return Tower((), blocks, final_norm)

    @classmethod
    def _functional(cls, config, dtype):
        check_bool("mask_padding", config["mask_padding"])
        layers = {layer.name: layer for layer in _layers(cls, config, dtype)}
        images = keras.Input(config["image_shape"], name="images")
        inputs = {"images": images, **text_inputs()}
        outputs, encoded = _run(layers.__getitem__, config, inputs)
        return inputs, outputs, encoded

    def _encoder(self, modality):
        if modality == "image":
            inputs = self.input["images"]
            by_name = {"images": inputs}
        else:
            inputs = {k: x for k, x in self.input.items() if k != "images"}
            by_name = inputs
        outputs, _ = _run(self.get_layer, self._config, by_name)
        return inputs, outputs[f"{modality}_embeddings"]

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks, as the images' routing has them."""
        return [f"image/block_{index}" for index in range(self._config["num_layers"])]

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        config = complete_config(cls, config)
        config = {**config, **cls._checked_sizes(config)}
        tower, dim = cls.tower(config, "float32"), config["hidden_dim"]
        max_length = config["max_length"]
        patches, num_patches = image_embedding(_padded(config), "float32")
        parts = []
        for modality, layers, shape in (
            ("image", patches, config["image_shape"]),
            ("text", text_embedding(config, "float32"), (max_length,)),
        ):
            part = Tower(layers, ()).parts(shape)[0][0]
            parts.append(part._replace(name=f"{modality}_embedding"))
        for layer in (*tower.blocks, tower.final_norm):
            costs = [layer_cost(layer, (n, dim)) for n in (num_patches, max_length)]
            # One set of weights, and the operations of both modalities.
            cost = costs[0]._replace(flops=sum(each.flops for each in costs))
            kind = "norm" if layer is tower.final_norm else block_kind(layer)
            parts.append(Part(layer.name, kind, *cost))
        cost = Cost.of_dense(dim, config["projection_dim"], use_bias=False)
        parts += [Part(f"{name}_projection", "dense", *cost) for name in MODALITIES]
        logit_scale = LogitScale(**config["temperature"])
        cost = logit_scale.cost((config["projection_dim"],))
        parts.append(Part("logit_scale", "scale", *cost))
        return parts, num_patches + max_length, dim

    @classmethod
    def sequence_lengths(cls, **config) -> tuple[int, ...]:
        config = complete_config(cls, config)
        _, num_patches = image_embedding(_padded(config), "float32")
        return num_patches, config["max_length"]


def _padded(config):
    """The arguments of the images' embedding."""
    return {**config, "patch_padding": "same", "position_embedding": "learned"}


def _layers(cls, config, dtype):
    """All layers of a backbone, not built."""
    tower = cls.tower(config, dtype)
    layers = [
        *image_embedding(_padded(config), dtype)[0],
        *text_embedding(config, dtype),
        embedding_dropout(config, dtype),
        *tower.layers,
        LogitScale(**config["temperature"], dtype=dtype, name="logit_scale"),
    ]
    for name in MODALITIES:
        layers += [
            MaskedPooling("average", dtype=dtype, name=f"{name}_pooler"),
            embedding_projection(
                config["projection_dim"], dtype=dtype, name=f"{name}_projection"
            ),
        ]
    return layers


def _run(layer, config, inputs):
    """The symbolic results for the modalities that are there."""
    tokens, masks = {}, {}
    if "images" in inputs:
        x = layer("patch_embedding")(inputs["images"])
        tokens["image"] = layer("position_embedding")(x)
        masks["image"] = ops.ones_like(tokens["image"][..., 0], dtype="bool")
    if "token_ids" in inputs:
        x = layer("token_embedding")(inputs["token_ids"])
        tokens["text"] = layer("text_positions")(x)
        masks["text"] = inputs["padding_mask"]
    ids = [
        ops.full_like(tokens[name][..., 0], MODALITIES.index(name), dtype="int32")
        for name in tokens
    ]
    # Images have a known number of tokens, and come first.
    boundaries = (tokens["image"].shape[1],) if len(tokens) > 1 else ()
    is_masked = config["mask_padding"] and "text" in tokens
    blocks = [layer(f"block_{index}") for index in range(config["num_layers"])]
    encoded = Tower((), tuple(blocks), layer("final_norm")).encode(
        layer("embedding_dropout")(_concatenated(tokens.values())),
        _concatenated(masks.values()) if is_masked else None,
        _concatenated(ids),
        boundaries,
    )
    runs = _runs(tokens, boundaries)
    embeddings = {}
    for name, run in runs.items():
        mask = {"mask": masks[name]} if is_masked and name == "text" else {}
        pooled = layer(f"{name}_pooler")(encoded.tokens[:, run], **mask)
        embeddings[f"{name}_embeddings"] = layer(f"{name}_projection")(pooled)
    routing = {
        f"{modality}/{name}": Routing(*(x[:, run] for x in record))
        for modality, run in runs.items()
        for name, record in encoded.routing.items()
    }
    block_tokens = {
        f"{modality}/{name}": x[:, run]
        for modality, run in runs.items()
        for name, x in encoded.block_tokens.items()
    }
    outputs = layer("logit_scale")(embeddings)
    return outputs, TowerOutputs(encoded.tokens, routing, block_tokens)


def _runs(modalities, boundaries):
    """The places of each modality's tokens."""
    if not boundaries:
        return dict.fromkeys(modalities, slice(None))
    (num_images,) = boundaries
    return {"image": slice(None, num_images), "text": slice(num_images, None)}


def _concatenated(parts):
    parts = list(parts)
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=1)
