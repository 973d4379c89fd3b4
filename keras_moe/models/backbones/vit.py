"""Vision transformers, dense (ViT) or with experts (V-MoE, Soft MoE).

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import dataclasses

import keras

from keras_moe._checks import check_bool
from keras_moe._types import DType
from keras_moe.models.backbones.base import ImageBackbone
from keras_moe.models.backbones.config import ImageConfig, TransformerConfig, takes
from keras_moe.models.backbones.tower import Tower, image_tower
from keras_moe.models.registry import register_backbone


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig, ImageConfig):
    """Arguments of `ViTBackbone`."""

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
    """A vision transformer with dense or mixture-of-experts feed-forward layers.

    With `moe=None` it is a ViT, with `moe=MoEConfig(moe_layers="every_2")` a V-MoE.

    `backbone.routing` holds the symbolic routing record of each MoE block, so
    `keras.Model(backbone.input, backbone.routing).predict(images)` returns the routers'
    decisions. `backbone.features` works the same way, with `"tokens"`, `"pooled"`,
    `"grid"` (B, rows, columns, D) and the tokens after each block (`"block_0"`, ...).

    On JAX, call a backbone only once per model: a second call loses the auxiliary
    losses of the first (Keras 3.15). Concatenate the inputs instead.

    Args:
        class_token: whether to prepend a learned class token.
        position_embedding: `"learned"`, `"sincos"` (fixed sines and cosines; none for
            the class token) or None.
        position_interpolation: how to resize learned positions and patch kernels when
            loading weights: `"bilinear"`, as in Google's releases, or `"bicubic"`, as
            in timm. See `keras_moe.layers.resize_positions` and `resize_patch_kernel`.
        embedding_norm: whether to normalise embedded tokens, as in CLIP.
        final_norm: whether to normalise the last block's tokens. If False, use a
            classifier with `pooled_norm`.
        **kwargs: arguments of `ImageConfig`, `TransformerConfig` and `MoEBackbone`.

    Input shape: (B, height, width, channels), in [-1, 1].

    Output shape: (B, N, D): normalised tokens, the class token (if any) first.

    Reference: *An Image is Worth 16x16 Words*; *Scaling Vision with Sparse Mixture of
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

    @takes(ViTConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @classmethod
    def tower(cls, config: ViTConfig, dtype: DType | None = None) -> Tower:
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
