"""Two-tower image-text models, dense or with experts.

Axes: B batch, N tokens, D hidden, P embedding.
"""

import copy
import dataclasses
from typing import Any, Self

import keras

from keras_moe._checks import check_bool, check_integer, check_one_of, check_seed, unfit
from keras_moe._compat import set_dtype_policy
from keras_moe._freezing import copy_freezing
from keras_moe._types import Config
from keras_moe.layers import LogitScale
from keras_moe.layers.pooling import check_pooling, pooling_layer
from keras_moe.losses.auxiliary import check_modalities
from keras_moe.models.backbones import _pairs
from keras_moe.models.backbones.base import MoEBackbone
from keras_moe.models.backbones.config import ModelArguments, check_no_ensemble, takes
from keras_moe.models.backbones.tower import (
    PooledProjection,
    TowerOutputs,
    embedding_projection,
    image_inputs,
    text_inputs,
)
from keras_moe.models.loading._overrides import tower_config, tower_families
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.registry import backbone_class, register_backbone

# Backbone class of each tower argument.
_TOWERS = {"image": "ViTBackbone", "text": "TextBackbone"}
# Seed offset of the text tower, so that towers draw different numbers.
_TEXT_SEED = 500_009


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(ModelArguments):
    """Arguments of `CLIPBackbone`."""

    image: Any = None
    text: Any = None
    projection_dim: int | None = 512
    projection_bias: bool = False
    image_pooling: str | None = None
    temperature: Any = "clip"
    seed: int | None = None

    def __post_init__(self):
        check_seed("seed", self.seed)
        check_bool("projection_bias", self.projection_bias)
        check_integer("projection_dim", self.projection_dim, optional=True)
        values = {"temperature": _pairs.temperature_config(self.temperature)}
        for name, family in _TOWERS.items():
            values[name] = self._tower(name, backbone_class(family))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        sizes = {name: self.embedding_size(name) for name in _TOWERS}
        if len({*sizes.values()}) > 1:
            expected = "embeddings of one size, or a projection_dim"
            raise unfit(expected, projection_dim=self.projection_dim, sizes=sizes)
        check_pooling(self.image_pooling, self.image.class_token)

    def _tower(self, name, family):
        tower = getattr(self, name)
        if isinstance(tower, keras.Model):
            tower = tower.config.to_dict()
        config = family.make_config(tower_config(family, name, tower or {}))
        check_no_ensemble(config.moe)
        count = getattr(config.moe, "modality_count", None)
        if count is not None:
            expected = f"experts of one modality in the tower {name}"
            raise unfit(expected, f"a moe for {count} modalities")
        losses = getattr(config.moe, "auxiliary_losses", None)
        if losses not in (None, "auto"):
            check_modalities(losses, 1)
        if name == "image" or self.projection_dim is None:
            return config
        return dataclasses.replace(
            config,
            projection_dim=self.projection_dim,
            projection_bias=self.projection_bias,
        )

    def embedding_size(self, modality: str) -> int:
        """P of a modality."""
        if modality == "image":
            return self.projection_dim or self.image.hidden_dim
        return self.text.projection_dim or self.text.hidden_dim

    def to_dict(self) -> dict:
        """Returns the arguments as plain values that recreate the config."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        for name in _TOWERS:
            values[name] = values[name].to_dict()
        if self.projection_dim is not None:
            # These follow from the pair's, which may be overridden.
            values["text"].update(projection_dim=None, projection_bias=False)
        return copy.deepcopy(values)


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class CLIPBackbone(_pairs.PairBackbone):
    """An image tower and a text tower with a shared embedding space.

    Each tower is dense or has experts, according to its `moe`: CLIP-UP's separated
    backbone has them in both. (For its shared backbone, use `LIMoEBackbone`.) The
    defaults are OpenAI's CLIP-B/32.

    CLIP-UP defines the capacity factor by C = S c / E; here C = S K c / E. With K = 2,
    its 2.0 is `capacity_factor=1.0` and its 4.0 is 2.0.

    In `from_preset`, overrides can be given per tower, such as `image={"num_experts":
    16}`, or flat for every tower that has the argument.

    Args:
        image: dict of `ViTBackbone` arguments (`moe` fields may be at the top level),
            or a `ViTBackbone` whose weights are copied (not in `from_preset`).
        text: the same for `TextBackbone`, whose projection is set below.
        projection_dim: P, the embedding size. With None, images are not projected and
            texts use their tower's setting, as in SigLIP.
        projection_bias: whether the projections have biases.
        image_pooling: pooling of image tokens, as in `ImageClassifier`. Defaults to the
            class token, or the average without one; SigLIP uses `"map"`.
        temperature: initial scale and bias of the similarities, as a
            `keras_moe.losses.Temperature`, a dict of its fields, or the name of a
            published one, such as `"clip"` or `"siglip"`. With a bias, the default loss
            is the sigmoid loss.
        seed: seed of noise and dropout in towers without their own.
        **kwargs: arguments of `MoEBackbone`.

    Input shape: dict of `"images"` (B, height, width, channels), `"token_ids"`,
    integers (B, N), and `"padding_mask"`, (B, N), False for padding.

    Output shape: dict of float32 unit vectors `"image_embeddings"` and
    `"text_embeddings"`, (B, P).

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*;
    *CLIP-UP: A Simple and Efficient Mixture-of-Experts CLIP Training Recipe with Sparse
    Upcycling*; *Sigmoid Loss for Language Image Pre-Training*.

    Example:

    >>> from keras_moe.models import CLIPBackbone
    >>> sizes = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 16}
    >>> backbone = CLIPBackbone(
    ...     image={"image_shape": (8, 8, 3), "patch_size": 4, **sizes,
    ...         "moe_layers": "every_2", "num_experts": 4},
    ...     text={"vocabulary_size": 20, "max_length": 6, **sizes},
    ...     projection_dim=4,
    ... )
    >>> token_ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19]])
    >>> pairs = {
    ...     "images": np.zeros((2, 8, 8, 3)), "token_ids": token_ids,
    ...     "padding_mask": token_ids != 0,
    ... }
    >>> {k: tuple(v.shape) for k, v in backbone(pairs).items()}
    {'image_embeddings': (2, 4), 'text_embeddings': (2, 4)}
    >>> list(backbone.routing)
    ['image/block_1']
    """

    config_class = CLIPConfig
    # For overrides and descriptions.
    towers = _TOWERS

    @takes(CLIPConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for modality in _TOWERS:
            tower = kwargs.get(modality)
            if isinstance(tower, keras.Model):
                own = self.tower_backbone(modality)
                for layer in tower.layers:
                    # Raises ValueError if there are others, such as LoRA adapters.
                    own.get_layer(layer.name).set_weights(layer.get_weights())
                copy_freezing(tower, own)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        model = super().from_config(config)
        for tower in map(model.tower_backbone, _pairs.MODALITIES):
            # It is beside the layers that the config tells of.
            if not any(weight.trainable for weight in tower.weights):
                tower.trainable = False
        return model

    @classmethod
    def _functional(cls, config, dtype):
        images: Any = image_inputs(config.image)
        inputs = {**images, **text_inputs()}
        with keras.name_scope("image"):
            backbone: Any = _tower_backbone(config, "image", dtype)
            mask = backbone.token_mask(backbone.input)
            pooler = _image_pooler(config, dtype)
            embedding = pooler(backbone.output, mask=mask)
        images = images.get("images", images)
        image = _encoder_model(backbone, embedding, "image")(images)
        with keras.name_scope("text"):
            backbone = _tower_backbone(config, "text", dtype)
        encoder = _encoder_model(backbone, backbone.output["pooled"], "text")
        text = encoder({k: inputs[k] for k in ("token_ids", "padding_mask")})
        logit_scale = LogitScale(**config.temperature, dtype=dtype, name="logit_scale")
        outputs = logit_scale(
            {
                "image_embeddings": image["embedding"],
                "text_embeddings": text["embedding"],
            }
        )
        both = {"image": image, "text": text}
        routing, block_tokens = (
            {f"{name}/{k}": v for name, of in both.items() for k, v in of[part].items()}
            for part in ("routing", "block_tokens")
        )
        return inputs, outputs, TowerOutputs(outputs, routing, block_tokens)

    def _encoder(self, modality):
        encoder = self.get_layer(modality)
        embedding = encoder(encoder.input)["embedding"]
        return encoder.input, self.logit_scale(embedding)

    def _layer_of(self, modality, name):
        return self.get_layer(modality).get_layer(name)

    def tower_backbone(self, modality: str) -> MoEBackbone:
        """Returns the `"image"` or `"text"` backbone, sharing this one's weights."""
        check_one_of("modality", modality, _pairs.MODALITIES)
        return self.get_layer(modality).tower_backbone

    @property
    def moe(self) -> dict:
        """The MoE configuration of each tower."""
        return {"image": self.config.image.moe, "text": self.config.text.moe}

    @property
    def block_names(self) -> list[str]:
        return [
            f"{name}/{block}"
            for name in _pairs.MODALITIES
            for block in self.tower_backbone(name).block_names
        ]

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self.config.image.image_shape

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches (rows, columns)."""
        return self.get_layer("image").tower_backbone.grid

    @property
    def hidden_dim(self) -> int:
        """Embedding size P."""
        return self.config.embedding_size("text")

    @property
    def _text_config(self):
        return self.config.text

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        parts, num_tokens = [], 0
        for name, family in tower_families(cls).items():
            tower = getattr(config, name)
            of_tower, tokens, dim = family.describe_parts(tower)
            parts += [part._replace(name=f"{name}/{part.name}") for part in of_tower]
            if name == "image":
                parts += _image_pooler(config, "float32").parts((tokens, dim), "image/")
            num_tokens += tokens
        size = config.embedding_size("text")
        cost = LogitScale(**config.temperature).cost((size,))
        parts.append(Part("logit_scale", "scale", *cost))
        return parts, num_tokens, size


def _tower_backbone(config, modality, dtype):
    """Creates a tower's backbone; its name prefixes the weights' paths."""
    arguments = getattr(config, modality).to_dict()
    if arguments["seed"] is None and config.seed is not None:
        arguments["seed"] = config.seed + _pairs.MODALITIES.index(modality) * _TEXT_SEED
    return backbone_class(_TOWERS[modality])(**arguments, dtype=dtype)


def _encoder_model(backbone, embedding, modality):
    outputs = {
        "embedding": embedding,
        "routing": backbone.routing,
        "block_tokens": backbone._block_tokens,
    }
    encoder = keras.Model(backbone.input, outputs, name=modality)
    # Functional models accept no dtype policy.
    set_dtype_policy(encoder, backbone.dtype_policy)
    # Bypass attribute tracking: Keras would save the layers twice.
    object.__setattr__(encoder, "tower_backbone", backbone)
    return encoder


def _image_pooler(config, dtype):
    return PooledProjection(
        pooling_layer(config.image.to_dict(), config.image_pooling, None, dtype),
        embedding_projection(config.projection_dim, config.projection_bias, dtype),
    )
