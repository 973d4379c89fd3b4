"""MLP-Mixer: tokens mix through an MLP, and blocks may be mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

from typing import Any

import keras

from keras_moe.checks import check_image_shape, check_integer, check_one_of
from keras_moe.layers import (
    MuMoEConfig,
    PatchEmbedding,
    TokenMLP,
    TokenMuMoE,
    resolve_moe_layers,
)
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.models.backbone import MoEBackbone
from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.overrides import complete_config
from keras_moe.models.registry import register_backbone, register_task
from keras_moe.models.tower import Tower, image_tower

TOKEN_MIXERS = ("mlp", MUMOE)


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class MixerBackbone(MoEBackbone):
    """An MLP-Mixer whose channel MLPs are dense or mixtures of experts.

    The number of patches is an axis of the token MLPs' weights, which serve images of
    one size, or of another size with patches that grow alike. They tell patches apart
    by their places, so that there is no `position_embedding`. Images are in [-1, 1].
    `routing` and `features` are those of `ViTBackbone`.

    Args:
        image_shape: (height, width, channels).
        patch_size: an int or (height, width), which divides the image.
        hidden_dim: D.
        num_layers: number of blocks.
        token_mlp_dim: H of the MLPs across tokens.
        mlp_dim: H of the MLPs across channels.
        activation: activation of all MLPs.
        dropout_rate: dropout rate on embeddings, token MLPs and dense channel MLPs.
        stochastic_depth: drop rate of the last block; see `ViTBackbone`.
        layer_norm_epsilon: epsilon of all normalisations.
        moe: `MoEConfig` or `MuMoEConfig`, or a dict of its fields: the mixtures in the
            place of channel MLPs; None for a dense mixer.
        token_mixer: `"mlp"`, or `"mumoe"` for `keras_moe.layers.TokenMuMoE` in the
            blocks of `moe`, a `MuMoEConfig`, with its experts. `routing` then has
            the records of channels (B, D, E) `"block_0/token_mixer"`, ..., too.
        rematerialize: whether training keeps the blocks' inputs only; see
            `ViTBackbone`.
        seed: seed of noise and dropout; see `ViTBackbone`.
        dtype: dtype policy; routing is float32 under each.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        (B, height, width, channels).

    Output shape:
        (B, N, D): the normalised tokens.

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together;
            if weights of another number of patches are loaded.

    Reference:
        *MLP-Mixer: An all-MLP Architecture for Vision*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import MixerBackbone
    >>> backbone = MixerBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     token_mlp_dim=4, mlp_dim=16, moe={"moe_layers": [1], "num_experts": 4},
    ... )
    >>> tuple(backbone(np.zeros((1, 8, 8, 3), "float32")).shape)
    (1, 4, 8)
    """

    def __init__(
        self,
        image_shape: tuple = (224, 224, 3),
        patch_size: Any = 32,
        hidden_dim: int = 768,
        num_layers: int = 12,
        token_mlp_dim: int = 384,
        mlp_dim: int = 3072,
        activation: Any = "gelu_tanh",
        dropout_rate: float = 0.0,
        stochastic_depth: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        moe: Any = None,
        token_mixer: str = "mlp",
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        super().__init__(
            {
                "image_shape": image_shape,
                "patch_size": patch_size,
                "hidden_dim": hidden_dim,
                "num_layers": num_layers,
                "token_mlp_dim": token_mlp_dim,
                "mlp_dim": mlp_dim,
                "activation": activation,
                "dropout_rate": dropout_rate,
                "stochastic_depth": stochastic_depth,
                "layer_norm_epsilon": layer_norm_epsilon,
                "moe": moe,
                "token_mixer": token_mixer,
                "rematerialize": rematerialize,
                "seed": seed,
            },
            dtype=dtype,
            **kwargs,
        )

    @classmethod
    def tower(cls, config: dict, dtype: Any = None) -> Tower:
        token_mlp_dim = check_integer("token_mlp_dim", config["token_mlp_dim"])
        check_one_of("token_mixer", config["token_mixer"], TOKEN_MIXERS)
        is_mumoe = config["token_mixer"] == MUMOE

        def token_mixer(spec, index):
            if is_mumoe and not isinstance(spec.moe, MuMoEConfig):
                raise ValueError(
                    "Expected router='mumoe' for token_mixer='mumoe'; "
                    f"received: router={spec.moe and spec.moe.router!r}"
                )
            if is_mumoe and index in resolve_moe_layers(
                spec.moe.moe_layers, spec.num_layers
            ):
                block = spec.moe.block(spec, token_mlp_dim)
                return TokenMuMoE(block, dtype=dtype, name="token_mumoe")
            return TokenMLP(
                token_mlp_dim,
                config["activation"],
                config["dropout_rate"],
                seed=spec.seed_of(index, 1),
                dtype=dtype,
                name="token_mlp",
            )

        return image_tower(config, dtype, token_mixer)

    @classmethod
    def config_for_weights(cls, saved: dict, config: dict) -> dict:
        # The patch kernel fits every image and patch; the token MLPs do not.
        saved, now = complete_config(cls, saved), complete_config(cls, config)
        received, expected = (
            PatchEmbedding(1, c["patch_size"]).grid(check_image_shape(c["image_shape"]))
            for c in (now, saved)
        )
        if received != expected:
            raise ValueError(
                f"Expected image_shape and patch_size that make {expected} patches, as "
                "the weights have, since a Mixer's token MLPs have the number of "
                f"patches for a shape; received: image_shape={now['image_shape']}, "
                f"patch_size={now['patch_size']}, which make {received}. Load with "
                "load_weights=False to start anew."
            )
        return super().config_for_weights(saved, config)


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class MixerImageClassifier(ImageClassifier):
    """A `MixerBackbone` with average pooling and a classification head.

    Args:
        backbone: a `MixerBackbone`.
        num_classes: number of classes.
        preprocessor, multi_label, representation_dim, head_bias, output_activation,
            dropout, head_dtype, pooled_norm, head, head_position: arguments of
            `ImageClassifier`.
        pooling: `"average"`, also for None, or `"first"`.
        pooling_query_key_norm: None, since nothing here attends.
        **kwargs: arguments of `keras_hub.models.ImageClassifier`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *MLP-Mixer: An all-MLP Architecture for Vision*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import MixerBackbone, MixerImageClassifier
    >>> backbone = MixerBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     token_mlp_dim=4, mlp_dim=16,
    ... )
    >>> classifier = MixerImageClassifier(backbone, num_classes=3)
    >>> tuple(classifier(np.zeros((4, 8, 8, 3), "float32")).shape)
    (4, 3)
    """

    backbone_cls = MixerBackbone
