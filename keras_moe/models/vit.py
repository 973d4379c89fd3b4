"""Vision transformers: dense (ViT) and with mixtures of experts (V-MoE, Soft MoE).

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import dataclasses
from typing import Any

import keras

from keras_moe.checks import check_bool
from keras_moe.models.backbone import ImageBackbone
from keras_moe.models.backbone_config import ImageConfig, TransformerConfig
from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.registry import register_backbone, register_task
from keras_moe.models.tower import Tower, image_tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig, ImageConfig):
    """The arguments of `ViTBackbone`.

    Args:
        class_token: whether a learned token stands before the patches.
        position_embedding: embedding of the patches' positions, added to the tokens:
            `"learned"`, a weight for each token; `"sincos"`, fixed sines and cosines
            for the patches (the class token has none); or None, so that the backbone
            does not know where a patch lies.
        position_interpolation: how learned embeddings are resized when weights of
            another image size or patch size are loaded, and patch kernels for the
            latter: `"bilinear"`, as in Google's releases, or `"bicubic"`, as in timm;
            see `keras_moe.layers.resize_positions` and `resize_patch_kernel`.
        embedding_norm: whether embedded tokens are normalised, as in CLIP.
        final_norm: whether the last block's tokens are normalised. Without it, a
            classifier with `pooled_norm` normalises what it pools.
    """

    class_token: bool = True
    position_embedding: str | None = "learned"
    position_interpolation: str = "bilinear"
    embedding_norm: bool = False
    final_norm: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("class_token", "embedding_norm", "final_norm"):
            check_bool(name, getattr(self, name))


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class ViTBackbone(ImageBackbone):
    """A vision transformer whose feed-forward layers are dense or mixtures of experts.

    With `moe=None` it is a ViT; with `moe=MoEConfig(moe_layers="every_2")` a V-MoE.
    Images are in [-1, 1].

    `backbone.routing` holds the symbolic routing record of each MoE block, so
    `keras.Model(backbone.input, backbone.routing).predict(images)` returns what the
    routers did. `backbone.features` holds `"tokens"`, `"pooled"`, `"grid"` (B, rows,
    columns, D) and the tokens after each block (`"block_0"`, ...) in the same way.

    On JAX a backbone that one model calls twice keeps the auxiliary losses of only one
    call (Keras 3.15): concatenate the inputs, and call it once.

    Args:
        dtype: dtype policy; routing is float32 under each.
        **kwargs: `name` and `trainable`.

    Input shape:
        (B, height, width, channels).

    Output shape:
        (B, N, D): the normalised tokens, the class token first if there is one.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision with Sparse Mixture of
        Experts*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ViTBackbone
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> tuple(backbone(np.zeros((1, 8, 8, 3), "float32")).shape)
    (1, 5, 8)
    >>> list(backbone.routing)
    ['block_1']
    """

    config_class = ViTConfig

    @classmethod
    def tower(cls, config: ViTConfig, dtype: Any = None) -> Tower:
        return image_tower(
            config,
            dtype,
            config.attention,
            final_norm=config.final_norm,
            class_token=config.class_token,
            position_embedding=config.position_embedding,
            position_interpolation=config.position_interpolation,
            norm=config.embedding_norm,
        )


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ViTImageClassifier(ImageClassifier):
    """A `ViTBackbone` with pooling and a classification head.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of classes.
        **kwargs: arguments of `ImageClassifier`, which also describes inputs and
            outputs.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP head).

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ViTBackbone, ViTImageClassifier
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> classifier = ViTImageClassifier(backbone, num_classes=3)
    >>> images, labels = np.zeros((4, 8, 8, 3), "float32"), np.array([0, 1, 2, 0])
    >>> history = classifier.fit(images, labels, verbose=0)
    >>> classifier.predict(images, verbose=0).shape
    (4, 3)
    """

    backbone_cls = ViTBackbone
