"""Vision transformers, dense (ViT) or with experts (V-MoE, Soft MoE).

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras

from keras_moe import _checks
from keras_moe._types import DType, Tensor
from keras_moe.layers import PatchEmbedding, PositionEmbedding, RotaryEmbedding2D
from keras_moe.layers.position_embedding import KINDS, PatchMask
from keras_moe.models.backbones.base import ImageBackbone
from keras_moe.models.backbones.config import (
    ImageConfig,
    TransformerConfig,
    check_no_ensemble,
    takes,
)
from keras_moe.models.backbones.tower import Tower, image_inputs, image_tower
from keras_moe.models.registry import register_backbone


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig, ImageConfig):
    """Arguments of `ViTBackbone`."""

    class_token: bool = True
    position_embedding: str | None = "learned"
    position_interpolation: str = "bilinear"
    register_tokens: int = 0
    rotary_base: float = 100.0
    embedding_norm: bool = False
    final_norm: bool = True
    max_patches: int | None = None

    def __post_init__(self):
        super().__post_init__()
        _checks.check_integer("max_patches", self.max_patches, optional=True)
        if self.max_patches is not None:
            check_no_ensemble(self.moe)
        kinds = (None, *KINDS, *ROTARY)
        _checks.check_one_of("position_embedding", self.position_embedding, kinds)
        _checks.check_integer("register_tokens", self.register_tokens, minimum=0)
        keys = self.num_key_value_heads
        if self.position_embedding == "golden_2d" and keys not in (
            None,
            self.num_heads,
        ):
            expected = f"num_heads={self.num_heads} heads of keys with golden_2d"
            raise _checks.unfit(expected, num_key_value_heads=keys)
        _checks.check_positive("rotary_base", self.rotary_base)
        for name in ("class_token", "embedding_norm", "final_norm"):
            _checks.check_bool(name, getattr(self, name))

    @property
    def example_shape(self) -> tuple[int, ...]:
        if self.max_patches is None:
            return self.image_shape
        pixels = math.prod(_checks.check_pair("patch_size", self.patch_size))
        return self.max_patches, pixels * self.image_shape[2]


# `position_embedding` -> kind of `RotaryEmbedding2D`.
ROTARY = {"rotary_2d": "axial", "golden_2d": "golden"}


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
            the class token), `"rotary_2d"` (attention rotates queries and keys by the
            patches' places, as in DINOv3), `"golden_2d"` (as in SigLino) or None.
        position_interpolation: how to resize learned positions and patch kernels when
            loading weights: `"bilinear"`, as in Google's releases, `"bicubic"`, as in
            timm, or `"torch_bicubic"`, as in DINOv2. See
            `keras_moe.layers.resize_positions` and `resize_patch_kernel`.
        register_tokens: number of learned tokens behind the class token that carry no
            patch, as in DINOv2 with registers and DINOv3.
        rotary_base: base of the frequencies of `"rotary_2d"`.
        embedding_norm: whether to normalise embedded tokens, as in CLIP.
        final_norm: whether to normalise the last block's tokens. If False, use a
            classifier with `pooled_norm`.
        max_patches: most patches of an image, for images of any shape in one batch
            (NaFlex); `image_shape` is then only that of learned positions, which are
            resized to each image. None for images of `image_shape`.
        **kwargs: arguments of `ImageConfig`, `TransformerConfig` and `MoEBackbone`.

    Input shape: (B, height, width, channels), in [-1, 1]. With `max_patches`, a dict of
    `"patches"` (B, L, patch height x patch width x channels), padded, with L up to
    `max_patches`, and `"grids"`, integers (B, 2), patches down and across: what an
    `ImagePreprocessor` with `max_patches` and `pad_patches` make. Padding is neither
    attended to nor routed nor pooled, so with routers that do not compete for capacity
    an image's features do not depend on the others.

    Output shape: (B, N, D): normalised tokens, the class token (if any) first, then
    registers, then patches.

    Reference: *An Image is Worth 16x16 Words*; *Scaling Vision with Sparse Mixture of
    Experts*.

    Example:

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
        kind = ROTARY.get(config.position_embedding or "")
        return image_tower(
            config,
            dtype,
            config.attention if kind is None else _rotary_attention(config, kind),
            final_norm=config.final_norm,
            class_token=config.class_token,
            register_tokens=config.register_tokens,
            position_embedding=None if kind else config.position_embedding,
            position_interpolation=config.position_interpolation,
            norm=config.embedding_norm,
        )

    @classmethod
    def _functional(cls, config, dtype):
        if config.max_patches is None:
            return super()._functional(config, dtype)
        inputs, tower = image_inputs(config), cls.tower(config, dtype)
        x, grids = inputs["patches"], inputs["grids"]
        first = config.class_token + config.register_tokens
        mask = PatchMask(first, name="patch_mask")(x, grids)
        for layer in tower.embedding:
            if isinstance(layer, PositionEmbedding):
                num_tokens = config.max_patches + config.class_token
                layer.build((None, num_tokens, config.hidden_dim))
                x = layer(x, grids=grids)
            else:
                x = layer(x)
        tower.build_slots(config.max_patches + first, config.hidden_dim)
        is_rotary = config.position_embedding in ROTARY
        arguments = {"positions": grids} if is_rotary else {}
        encoded = tower.encode(x, mask, mixer_arguments=arguments)
        return inputs, encoded.tokens, encoded

    def token_mask(self, inputs: Any) -> Tensor | None:
        if self.config.max_patches is None:
            return None
        return self.get_layer("patch_mask")(inputs["patches"], inputs["grids"])

    def patches_of(self, tokens: Tensor) -> dict[str, Tensor]:
        if self.config.max_patches is None:
            return super().patches_of(tokens)
        return {"patches": tokens[:, self.first_patch :]}

    @property
    def grid(self) -> tuple[int, int]:
        if (most := self.config.max_patches) is not None:
            raise _checks.unfit("images of one shape for a grid", max_patches=most)
        return super().grid


def _rotary_attention(config: ViTConfig, kind: str) -> Callable:
    """Makes a block's attention with rotary positions of its own."""

    grid = None
    if config.max_patches is None:
        patches = PatchEmbedding(config.hidden_dim, config.patch_size)
        grid = patches.grid(config.image_shape)

    def attention(spec, index):
        rotary = RotaryEmbedding2D(
            grid,
            kind,
            config.rotary_base,
            first=config.class_token + config.register_tokens,
            dtype=spec.dtype,
            name="rotary_embedding",
        )
        return config.attention(spec, index, positions=rotary)

    return attention
