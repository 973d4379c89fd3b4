"""MLP-Mixer, dense or with experts (E). Axes: B batch, N tokens, D hidden, H mlp."""

import dataclasses
from typing import Any

import keras

from keras_moe._checks import check_integer, check_one_of, unfit
from keras_moe._types import DType
from keras_moe.layers import (
    MuMoEConfig,
    TokenMLP,
    TokenMuMoE,
    TowerSpec,
    resolve_moe_layers,
)
from keras_moe.layers.moe_config import MUMOE
from keras_moe.models.backbones.base import ImageBackbone
from keras_moe.models.backbones.config import ImageConfig, takes
from keras_moe.models.backbones.tower import Tower, image_tower
from keras_moe.models.registry import register_backbone

TOKEN_MIXERS = ("mlp", MUMOE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageConfig):
    """Arguments of `MixerBackbone`."""

    token_mlp_dim: int = 384
    token_mixer: str = "mlp"
    initialization: Any = "mixer"

    def __post_init__(self):
        super().__post_init__()
        check_integer("token_mlp_dim", self.token_mlp_dim)
        check_one_of("token_mixer", self.token_mixer, TOKEN_MIXERS)
        if self.token_mixer == MUMOE and not isinstance(self.moe, MuMoEConfig):
            expected = "router='mumoe' for token_mixer='mumoe'"
            raise unfit(expected, router=self.moe and self.moe.router)

    def mix(self, spec: TowerSpec, index: int) -> keras.layers.Layer:
        """Creates the token mixer of a block, unbuilt."""
        if self.token_mixer == MUMOE and index in resolve_moe_layers(
            spec.moe.moe_layers, spec.num_layers
        ):
            block = spec.moe.block(spec, self.token_mlp_dim)
            return TokenMuMoE(block, dtype=spec.dtype, name="token_mumoe")
        return TokenMLP(
            self.token_mlp_dim,
            self.activation,
            self.dropout_rate,
            seed=spec.seed_of(index, 1),
            use_bias=self.use_bias,
            dtype=spec.dtype,
            name="token_mlp",
        )


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class MixerBackbone(ImageBackbone):
    """An MLP-Mixer with dense or mixture-of-experts channel MLPs.

    The number of patches is part of the weights' shapes, so another image size needs a
    patch size that grows with it. There is no `position_embedding`. `routing` and
    `features` work as in `ViTBackbone`.

    Args:
        token_mlp_dim: H of the token-mixing MLPs.
        token_mixer: `"mlp"`, or `"mumoe"` to use `keras_moe.layers.TokenMuMoE` in the
            blocks that `moe`, a `MuMoEConfig`, selects. `routing` then has a record
            over channels (B, D, E), such as `"block_0/token_mixer"`.
        **kwargs: arguments of `ImageConfig` and `MoEBackbone`.

    Input shape: (B, height, width, channels), in [-1, 1]. Output shape: (B, N, D).

    Reference: *MLP-Mixer: An all-MLP Architecture for Vision*.

    Example:

    >>> from keras_moe.models import MixerBackbone
    >>> backbone = MixerBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     token_mlp_dim=4, mlp_dim=16, moe={"moe_layers": [1], "num_experts": 4},
    ... )
    >>> tuple(backbone(np.zeros((1, 8, 8, 3), "float32")).shape)
    (1, 4, 8)
    """

    config_class = MixerConfig

    @takes(MixerConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @classmethod
    def tower(cls, config: MixerConfig, dtype: DType | None = None) -> Tower:
        return image_tower(config, dtype, config.mix)
