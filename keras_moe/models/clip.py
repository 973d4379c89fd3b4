"""Two towers, of images and of texts, whose blocks are dense or mixtures of experts.

Axes: B batch, N tokens, D hidden, P embedding.
"""

from typing import Any

import keras

from keras_moe.checks import check_bool, check_integer, check_one_of, check_seed
from keras_moe.compat import flatten_layers, set_dtype_policy
from keras_moe.layers import LogitScale, moe_config
from keras_moe.losses import check_modalities
from keras_moe.models.backbone import MoEBackbone
from keras_moe.models.classifier_head import check_pooling, pooling_layer
from keras_moe.models.description import Part
from keras_moe.models.overrides import (
    complete_config,
    tower_config,
    tower_families,
)
from keras_moe.models.pair_backbone import (
    MODALITIES,
    PairBackbone,
    plain_temperature,
    text_inputs,
)
from keras_moe.models.registry import register_backbone
from keras_moe.models.tower import TowerOutputs, embedding_projection
from keras_moe.ops import Cost

# Added to the seed for the tower of texts, so that both draw for themselves.
_TEXT_SEED = 500_009


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class CLIPBackbone(PairBackbone):
    """A tower of images and one of texts, which embed pairs into one space.

    Each tower is dense, or has mixtures of experts by its own `moe`: CLIP-UP's
    separated backbone has them in both. (Its shared one, one transformer for both, is
    `LIMoEBackbone`.) The defaults are OpenAI's CLIP-B/32.

    CLIP-UP's capacity factor 2.0 is in Switch's convention, without the number of
    selected experts: C = 2.0 S / E. With K = 2 it is `capacity_factor=1.0` here, where
    C = S K c / E, and its 4.0 is 2.0.

    `from_preset` takes overrides by tower, such as `image={"num_experts": 16}`, or a
    name of the towers' own, which holds for each tower that has it: `num_experts=16`
    for both, `image_shape=(336, 336, 3)` for the images'.

    Args:
        image: arguments of `ViTBackbone` by name, those of `moe` also flatly; or a
            `ViTBackbone`, whose weights are copied (not by `from_preset`).
        text: arguments of `TextBackbone`, likewise. Its `projection_dim` and
            `projection_bias` follow from those below, unless `projection_dim` is None.
        projection_dim: P, to which both towers' pooled vectors are projected; None has
            no projection of images, and texts have that of `text`, as in SigLIP.
        projection_bias: whether the projections have biases.
        image_pooling: pooling of the images' tokens, as in `ImageClassifier`: None
            takes the class token, or the average without one; `"map"` is SigLIP's.
        temperature: scale of the similarities at the start, its bound, and their bias:
            a `keras_moe.losses.Temperature`, a dict of its fields, or the name of a
            published one, such as `"clip"` or `"siglip"`. With a bias the default loss
            is the sigmoid loss.
        seed: seed of noise, dropout and stochastic depth in both towers, unless a tower
            has one of its own.
        dtype: dtype policy; routing and embeddings are float32 under each.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        A dict: `"images"` (B, height, width, channels), `"token_ids"`, integers (B, N),
        and `"padding_mask"`, boolean or integers (B, N), False for padding.

    Output shape:
        A dict: `"image_embeddings"` and `"text_embeddings"`, unit vectors, float32
        (B, P).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*;
        *CLIP-UP: A Simple and Efficient Mixture-of-Experts CLIP Training Recipe with
        Sparse Upcycling*; *Sigmoid Loss for Language Image Pre-Training*.

    Example:

    >>> import numpy as np
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

    # The families of the towers by argument, for overrides and descriptions.
    towers = {"image": "ViTBackbone", "text": "TextBackbone"}

    def __init__(
        self,
        image: Any = None,
        text: Any = None,
        projection_dim: int | None = 512,
        projection_bias: bool = False,
        image_pooling: str | None = None,
        temperature: Any = "clip",
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        super().__init__(
            {
                "image": _config_of(image),
                "text": _config_of(text),
                "projection_dim": projection_dim,
                "projection_bias": projection_bias,
                "image_pooling": image_pooling,
                "temperature": temperature,
                "seed": seed,
            },
            dtype=dtype,
            **kwargs,
        )
        for modality, tower in (("image", image), ("text", text)):
            if isinstance(tower, keras.Model):
                _copy_weights(tower, self.tower_backbone(modality), modality)

    @classmethod
    def _plain_config(cls, config):
        check_seed("seed", config["seed"])
        check_bool("projection_bias", config["projection_bias"])
        config = {**config, "temperature": plain_temperature(config["temperature"])}
        for name, family in tower_families(cls).items():
            tower = tower_config(family, name, config[name] or {})
            config[name] = family._plain_config(complete_config(family, tower))
            _check_one_modality(name, config[name]["moe"])
        text, projection_dim = config["text"], config["projection_dim"]
        if projection_dim is not None:
            check_integer("projection_dim", projection_dim)
            if text["projection_dim"] not in (None, projection_dim):
                raise ValueError(
                    "Expected the text's projection_dim to be that of the pair, "
                    f"{projection_dim}; received: text={{'projection_dim': "
                    f"{text['projection_dim']}}}"
                )
            text["projection_dim"] = projection_dim
            text["projection_bias"] = config["projection_bias"]
        elif config["projection_bias"]:
            raise ValueError(
                "Expected projection_dim beside projection_bias=True; received: "
                "projection_dim=None"
            )
        sizes = _embedding_sizes(config)
        if sizes["image"] != sizes["text"]:
            raise ValueError(
                "Expected embeddings of one size, or a projection_dim; received: "
                f"projection_dim={projection_dim}, images of {sizes['image']}, texts "
                f"of {sizes['text']}"
            )
        check_pooling(config["image_pooling"], config["image"]["class_token"])
        return config

    @classmethod
    def _functional(cls, config, dtype):
        inputs = {
            "images": keras.Input(config["image"]["image_shape"], name="images"),
            **text_inputs(),
        }
        image = _image_encoder(config, dtype)(inputs["images"])
        names = ("token_ids", "padding_mask")
        text = _text_encoder(config, dtype)({name: inputs[name] for name in names})
        logit_scale = LogitScale(
            **config["temperature"], dtype=dtype, name="logit_scale"
        )
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
        return inputs, outputs, TowerOutputs(None, routing, block_tokens)

    def _encoder(self, modality):
        encoder = self.get_layer(modality)
        embedding = encoder(encoder.input)["embedding"]
        return encoder.input, self.logit_scale(embedding)

    def _layer_of(self, modality, name):
        return self.get_layer(modality).get_layer(name)

    def tower_backbone(self, modality: str) -> MoEBackbone:
        """The backbone of one modality, which shares this one's weights.

        Args:
            modality: modality, `"image"` or `"text"`.

        Raises:
            ValueError: if `modality` is unknown.
        """
        check_one_of("modality", modality, MODALITIES)
        return self.get_layer(modality).tower_backbone

    def get_config(self):
        config = super().get_config()
        if config["projection_dim"] is not None:
            # They follow from the pair's, which may be overridden.
            config["text"].update(projection_dim=None, projection_bias=False)
        return config

    @property
    def moe(self) -> dict:
        """Which blocks are mixtures of experts, and of what, by tower."""
        return {name: self.tower_backbone(name).moe for name in MODALITIES}

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks, those of the images first."""
        return [
            f"{name}/{block}"
            for name in MODALITIES
            for block in self.tower_backbone(name).block_names
        ]

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self._config["image"]["image_shape"]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.tower_backbone("image").grid

    @property
    def hidden_dim(self) -> int:
        """P, the size of the embeddings."""
        return _embedding_sizes(self._config)["text"]

    @property
    def _text_config(self):
        return self._config["text"]

    @classmethod
    def config_for_weights(cls, saved: dict, config: dict) -> dict:
        towers = {
            name: family.config_for_weights(saved[name], config[name])
            for name, family in tower_families(cls).items()
        }
        return {**config, **towers}

    @classmethod
    def unbuilt_blocks(cls, **config) -> list:
        config = complete_config(cls, config)
        return [
            block
            for name, family in tower_families(cls).items()
            for block in family.unbuilt_blocks(**config[name])
        ]

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        config = cls._plain_config(complete_config(cls, config))
        parts, num_tokens, dims = [], 0, {}
        for name, family in tower_families(cls).items():
            of_tower, tokens, dims[name] = family.describe_parts(**config[name])
            parts += [part._replace(name=f"{name}/{part.name}") for part in of_tower]
            if name == "image":
                parts += _image_parts(config, (tokens, dims[name]))
            num_tokens += tokens
        logit_scale = LogitScale(**config["temperature"])
        size = _embedding_sizes(config)["text"]
        parts.append(Part("logit_scale", "scale", *logit_scale.cost((size,))))
        return parts, num_tokens, size


def _config_of(tower):
    """The arguments of a tower, from a dict, a backbone or None."""
    if isinstance(tower, keras.Model):
        config = tower.get_config()
        not_own = ("name", "trainable", "dtype")
        return {k: v for k, v in config.items() if k not in not_own}
    return tower


def _copy_weights(source, target, modality):
    """Copies the weights of a backbone, layer by layer."""
    for layer in source.layers:
        weights = [w for w in layer.weights if "seed_generator" not in w.path]
        if not weights:
            continue
        new = target.get_layer(layer.name)
        others = [w for w in new.weights if "seed_generator" not in w.path]
        kinds = [[(w.name, tuple(w.shape)) for w in x] for x in (weights, others)]
        is_int8 = any(
            getattr(x, "quantization_mode", None) for x in flatten_layers(layer)
        )
        if kinds[0] != kinds[1] or is_int8:
            raise ValueError(
                f"Expected {modality} to be a backbone with the weights of its config, "
                "neither quantised nor with low-rank pairs: save it to a preset and "
                f"load it first; received: layer {layer.name!r} of others"
            )
        for weight, other in zip(weights, others):
            # Through an array: on JAX both variables would share one buffer.
            other.assign(keras.ops.convert_to_numpy(weight))
        new.trainable = layer.trainable


def _check_one_modality(name, moe):
    """Raises ValueError for experts that tell modalities apart in a tower of one."""
    moe = moe_config(moe)
    count = getattr(moe, "modality_count", None)
    if count is not None:
        raise ValueError(
            f"Expected experts of one modality in the tower {name}, with "
            "num_modalities=None, expert_pools=None and no priority by modality; "
            f"received: a moe for {count} modalities"
        )
    losses = getattr(moe, "auxiliary_losses", None)
    if losses not in (None, "auto"):
        try:
            check_modalities(losses, 1)
        except ValueError as error:
            raise ValueError(
                f"Expected losses of one modality in the tower {name}; received: "
                f"{losses} ({error})"
            ) from error


def _embedding_sizes(config):
    """P of each modality."""
    text = config["text"]
    return {
        "image": config["projection_dim"] or config["image"]["hidden_dim"],
        "text": text["projection_dim"] or text["hidden_dim"],
    }


def _tower_backbone(config, modality, dtype):
    """The backbone of a tower, in whose name its weights' paths begin."""
    seed = config["seed"]
    tower = dict(config[modality])
    if tower["seed"] is None and seed is not None:
        tower["seed"] = seed + MODALITIES.index(modality) * _TEXT_SEED
    return tower_families(CLIPBackbone)[modality](**tower, dtype=dtype)


def _encoder_model(backbone, embedding, modality):
    """A tower as one model with all that is asked of it."""
    outputs = {
        "embedding": embedding,
        "routing": backbone.routing,
        "block_tokens": backbone._block_tokens,
    }
    encoder = keras.Model(backbone.input, outputs, name=modality)
    # A functional model takes no policy.
    set_dtype_policy(encoder, backbone.dtype_policy)
    # A plain attribute: Keras would save the layers twice.
    object.__setattr__(encoder, "tower_backbone", backbone)
    return encoder


def _image_encoder(config, dtype):
    with keras.name_scope("image"):
        backbone = _tower_backbone(config, "image", dtype)
        pooler, projection = _image_head(config, dtype)
        embedding = pooler(backbone.output)
        if projection is not None:
            embedding = projection(embedding)
    return _encoder_model(backbone, embedding, "image")


def _text_encoder(config, dtype):
    with keras.name_scope("text"):
        backbone = _tower_backbone(config, "text", dtype)
    return _encoder_model(backbone, backbone.output["pooled"], "text")


def _image_head(config, dtype):
    """The pooling and the projection of images, not built."""
    image = config["image"]
    pooling = check_pooling(config["image_pooling"], image["class_token"])
    pooler = pooling_layer(image, pooling, None, dtype)
    if config["projection_dim"] is None:
        return pooler, None
    projection = embedding_projection(
        config["projection_dim"], config["projection_bias"], dtype
    )
    return pooler, projection


def _image_parts(config, shape):
    pooler, projection = _image_head(config, "float32")
    parts, cost = [], pooler.cost(shape)
    if cost.parameters:
        parts.append(Part("image/pooler", "MAP", *cost))
    if projection is not None:
        cost = Cost.of_dense(shape[-1], projection.units, projection.use_bias)
        parts.append(Part("image/projection", "dense", *cost))
    return parts
