"""MLP-Mixer: tokens mix through an MLP, and blocks may be mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

from typing import Any

import keras

from keras_moe.checks import check_image_shape, check_integer, check_one_of
from keras_moe.layers import (
    PatchEmbedding,
    TokenMLP,
    TokenMuMoE,
    resolve_moe_layers,
)
from keras_moe.layers.feed_forwards import MUMOE, mumoe_block
from keras_moe.models.registry import register_backbone
from keras_moe.models.vision_backbone import VisionBackbone

TOKEN_MIXERS = ("mlp", MUMOE)


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class MixerBackbone(VisionBackbone):
    """An MLP-Mixer whose channel MLPs are dense or mixtures of experts.

    The token MLPs have the number of patches for a shape, so weights serve images of
    one size, or of another with patches that grow alike. They tell patches apart by
    their places, so that there is no `position_embedding`. Images are in [-1, 1].
    `routing` and `features` are those of `ViTBackbone`.

    Args:
        image_shape: (height, width, channels).
        patch_size: an int or (height, width); divides the image.
        hidden_dim: D.
        num_layers: blocks.
        token_mlp_dim: H of the MLPs across tokens.
        mlp_dim: H of the MLPs across channels.
        activation: of all MLPs.
        dropout_rate: on embeddings, token MLPs and dense channel MLPs.
        stochastic_depth: the last block's drop rate; see `ViTBackbone`.
        layer_norm_epsilon: of all normalisations.
        moe_layers, num_experts, router, router_options, num_selected_experts,
        expert_mlp_dim, capacity_factor, evaluation, eval_capacity_factor,
        eval_capacity, dropless, capacity_rounding, capacity_multiple_of, priority,
        noise_std, images_per_group, auxiliary_losses, expert_dropout,
        shared_expert_initialization, dispatcher, zero_experts, copy_experts,
        constant_experts, tau, gating_residual, gated_experts, expert_use_bias,
        expert_activation: the MoE layers in the place of channel MLPs; see
            `ViTBackbone`.
        token_mixer: `"mlp"`, or `"mumoe"` for `keras_moe.layers.TokenMuMoE` in the
            blocks of `moe_layers`, with `num_experts` and `router_options`; takes
            `router="mumoe"`. `routing` then has `"block_0/token_mixer"`, ... besides,
            records of channels (B, D, E).
        rematerialize: as `ViTBackbone`'s.
        seed: of noise and dropout; see `ViTBackbone`.
        dtype: dtype policy; routing is float32 under each.
        **kwargs: see `keras_hub.models.Backbone`.

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
    ...     token_mlp_dim=4, mlp_dim=16, moe_layers=[1], num_experts=4,
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
        moe_layers: Any = None,
        num_experts: Any = 32,
        router: str = "softmax_token_choice",
        router_options: dict | None = None,
        num_selected_experts: int = 2,
        expert_mlp_dim: int | None = None,
        capacity_factor: Any = "auto",
        evaluation: str | None = None,
        eval_capacity_factor: float | None = None,
        eval_capacity: int | None = None,
        dropless: bool = False,
        capacity_rounding: str = "auto",
        capacity_multiple_of: int | None = None,
        priority: str = "first_come",
        noise_std: float | None = None,
        images_per_group: int | None = 8,
        auxiliary_losses: Any = "auto",
        expert_dropout: float = 0.0,
        shared_expert_initialization: Any = "auto",
        dispatcher: str = "index",
        zero_experts: int = 0,
        copy_experts: int = 0,
        constant_experts: Any = 0,
        tau: float = 0.75,
        gating_residual: Any = "auto",
        gated_experts: bool = False,
        expert_use_bias: bool = True,
        expert_activation: Any = None,
        token_mixer: str = "mlp",
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        self._assemble(locals(), dtype, kwargs)

    @staticmethod
    def _token_mixer(
        index,
        num_tokens,
        seeds,
        dtype,
        token_mlp_dim,
        activation,
        dropout_rate,
        token_mixer,
        num_layers,
        moe_layers,
        router,
        num_experts,
        router_options,
        expert_activation,
        **_,
    ):
        check_integer("token_mlp_dim", token_mlp_dim)
        check_one_of("token_mixer", token_mixer, TOKEN_MIXERS)
        if token_mixer == MUMOE and router != MUMOE:
            raise ValueError(
                "Expected router='mumoe' for token_mixer='mumoe'; "
                f"received: router={router!r}"
            )
        if token_mixer == MUMOE and index in resolve_moe_layers(moe_layers, num_layers):
            block = mumoe_block(
                router_options,
                mlp_dim=token_mlp_dim,
                num_experts=num_experts,
                hidden_activation=expert_activation or activation,
                dtype=dtype,
                name="moe",
            )
            return TokenMuMoE(block, dtype=dtype, name="token_mumoe")
        return TokenMLP(
            token_mlp_dim,
            activation,
            dropout_rate,
            seed=seeds(1),
            dtype=dtype,
            name="token_mlp",
        )

    @classmethod
    def overrides_for_weights(cls, saved, overrides):
        # The patch kernel fits every image and patch; the token MLPs do not.
        now = {**saved, **overrides}
        found, expected = (
            PatchEmbedding(1, of["patch_size"]).grid(
                check_image_shape(of["image_shape"])
            )
            for of in (now, saved)
        )
        if found != expected:
            raise ValueError(
                f"Expected image_shape and patch_size that make {expected} patches, as "
                "the weights have, since a Mixer's token MLPs have the number of "
                f"patches for a shape; received: image_shape={now['image_shape']}, "
                f"patch_size={now['patch_size']}, which make {found}. Load with "
                "load_weights=False to start anew."
            )
        return super().overrides_for_weights(saved, overrides)
