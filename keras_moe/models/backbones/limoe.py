"""One transformer with shared experts for images and texts.

Axes: B batch, N tokens (image tokens first), D hidden, P embedding.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_integer, unfit
from keras_moe._types import DType
from keras_moe.layers import LogitScale, MaskedPooling, MoEConfig, TowerSpec
from keras_moe.losses.auxiliary import check_modalities
from keras_moe.models.backbones._pairs import (
    MODALITIES,
    PairBackbone,
    temperature_config,
)
from keras_moe.models.backbones.base import ImageBackbone
from keras_moe.models.backbones.config import (
    ImageConfig,
    TokenIdsConfig,
    TransformerConfig,
    takes,
)
from keras_moe.models.backbones.tower import (
    Tower,
    TowerOutputs,
    block_part,
    embedding_dropout,
    embedding_projection,
    final_norm_layer,
    image_embedding,
    text_embedding,
    text_inputs,
)
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.registry import register_backbone
from keras_moe.ops import Cost, Routing
from keras_moe.routers import SoftRouter


@dataclasses.dataclass(frozen=True, kw_only=True)
class LIMoEConfig(TransformerConfig, TokenIdsConfig, ImageConfig):
    """Arguments of `LIMoEBackbone`."""

    vocabulary_size: int = 32000
    max_length: int = 16
    mask_padding: bool = False
    projection_dim: int = 512
    temperature: Any = "limoe"

    def __post_init__(self):
        super().__post_init__()
        self._set(
            projection_dim=check_integer("projection_dim", self.projection_dim),
            temperature=temperature_config(self.temperature),
        )
        count = getattr(self.moe, "modality_count", None)
        if count not in (None, len(MODALITIES)):
            expected = f"a moe for {len(MODALITIES)} modalities, images and texts"
            raise unfit(expected, f"one for {count}")
        if isinstance(self.moe, MoEConfig) and self.moe.auxiliary_losses != "auto":
            check_modalities(self.moe.auxiliary_losses, len(MODALITIES))


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class LIMoEBackbone(PairBackbone):
    """One transformer for images and texts, with shared blocks and experts.

    Patches and token ids have separate embeddings and learned positions. Tokens attend
    only within their own example and modality, while each MoE layer routes the image
    and text tokens of a group together. The tokens of each modality are averaged and
    projected. The defaults are LIMoE-B/32; without `moe` it is the dense one-tower
    model.

    Routers can use modality ids (0 for images, 1 for texts): `num_modalities=2` gives
    each modality its own router kernel, `expert_pools` its own experts (appendix E.3),
    and `priority` decides which tokens a full expert keeps: those with the largest
    gates (appendix E.1), `[0, 1]` images first, `[1, 0]` texts first, or `"shuffled"`
    (figure 6).

    Where the paper is silent, dropout and pre-norms are as in ViT, and both modalities
    share a final norm before the average.

    Args:
        patch_size: an int or (height, width). Images are zero-padded to whole patches.
        vocabulary_size: V, the number of token ids.
        max_length: maximum text length N, special tokens included.
        mask_padding: whether padding is excluded from attention, routing and averages
            (the paper routes it). Every text needs a token that is not padding.
        projection_dim: width P of the embeddings.
        temperature: scale and bias of the similarities; see `CLIPBackbone`.
        **kwargs: arguments of `ImageConfig`, `TransformerConfig` and `MoEBackbone`.
            Soft routers are not allowed in `moe`: they would mix images with texts.

    Input and output shapes: as `CLIPBackbone`, with N up to `max_length`.

    Reference: *Multimodal Contrastive Learning with LIMoE: the Language-Image Mixture
    of Experts*, section 2 and appendices A, B and E, table 4.

    Example:

    >>> from keras_moe.models import LIMoEBackbone
    >>> backbone = LIMoEBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, vocabulary_size=20, max_length=6,
    ...     hidden_dim=8, num_layers=2, num_heads=2, mlp_dim=16, projection_dim=4,
    ...     moe={"num_experts": 4},
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

    config_class = LIMoEConfig
    image_shape, grid = ImageBackbone.image_shape, ImageBackbone.grid

    @takes(LIMoEConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @classmethod
    def tower(cls, config: LIMoEConfig, dtype: DType | None = None) -> Tower:
        _, num_patches = _image_embedding(config, dtype)
        spec = TowerSpec.of(config, num_patches + config.max_length, dtype)
        blocks = spec.blocks(lambda index: config.attention(spec, index))
        for block in blocks:
            if isinstance(getattr(block.feed_forward, "router", None), SoftRouter):
                expected = "another router, since soft routing mixes images with texts"
                raise unfit(expected, router=block.feed_forward.router.summary)
        # Each modality is embedded separately, before this tower.
        return Tower((), blocks, final_norm_layer(config, dtype))

    @classmethod
    def _functional(cls, config, dtype):
        layers = {layer.name: layer for layer in _layers(cls, config, dtype)}
        images = keras.Input(config.image_shape, name="images")
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
        outputs, _ = _run(self.get_layer, self.config, by_name)
        return inputs, outputs[f"{modality}_embeddings"]

    @property
    def block_names(self) -> list[str]:
        """Block names, as used in the image routing."""
        return [f"image/{name}" for name in super().block_names]

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        tower, dim = cls.tower(config, "float32"), config.hidden_dim
        max_length = config.max_length
        patches, num_patches = _image_embedding(config, "float32")
        parts = []
        for modality, layers, shape in (
            ("image", patches, config.image_shape),
            ("text", text_embedding(config, "float32"), (max_length,)),
        ):
            part = Tower(layers, ()).parts(shape)[0][0]
            parts.append(part._replace(name=f"{modality}_embedding"))
        for layer in tower.layers:
            part = block_part(layer, (num_patches, dim), (max_length, dim))
            is_norm = layer is tower.final_norm
            parts.append(part._replace(kind="norm") if is_norm else part)
        cost = Cost.of_dense(dim, config.projection_dim, use_bias=False)
        parts += [Part(f"{name}_projection", "dense", *cost) for name in MODALITIES]
        cost = LogitScale(**config.temperature).cost((config.projection_dim,))
        parts.append(Part("logit_scale", "scale", *cost))
        return parts, num_patches + max_length, dim

    @classmethod
    def sequence_lengths(cls, config: Any) -> tuple[int, ...]:
        return _image_embedding(config, "float32")[1], config.max_length


def _image_embedding(config, dtype):
    return image_embedding(config, dtype, padding="same", position_embedding="learned")


def _layers(cls, config, dtype):
    tower = cls.tower(config, dtype)
    layers = [
        *_image_embedding(config, dtype)[0],
        *text_embedding(config, dtype),
        embedding_dropout(config, dtype),
        *tower.layers,
        LogitScale(**config.temperature, dtype=dtype, name="logit_scale"),
    ]
    for name in MODALITIES:
        layers += [
            MaskedPooling("average", dtype=dtype, name=f"{name}_pooler"),
            embedding_projection(
                config.projection_dim, dtype=dtype, name=f"{name}_projection"
            ),
        ]
    return layers


def _run(layer, config, inputs):
    """Returns the symbolic results of the given modalities."""
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
    # Slices of each modality's tokens: images come first, with a known number of them.
    boundaries, runs = (), dict.fromkeys(tokens, slice(None))
    if len(tokens) > 1:
        boundaries = (tokens["image"].shape[1],)
        runs = {"image": slice(*boundaries), "text": slice(*boundaries, None)}
    is_masked = config.mask_padding and "text" in tokens
    blocks = [layer(f"block_{index}") for index in range(config.num_layers)]
    encoded = Tower((), tuple(blocks), layer("final_norm")).encode(
        layer("embedding_dropout")(_concatenated(tokens.values())),
        _concatenated(masks.values()) if is_masked else None,
        _concatenated(ids),
        boundaries,
    )
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


def _concatenated(parts):
    parts = list(parts)
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=1)
