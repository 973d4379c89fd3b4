"""Layers: experts, the MoE layer, encoder blocks, embeddings and pooling."""

from keras_moe.layers.activations import gelu_tanh, quick_gelu
from keras_moe.layers.class_token import ClassToken
from keras_moe.layers.encoder_block import EncoderBlock, LayerScale, MoEEncoderBlock
from keras_moe.layers.encoder_spec import EncoderConfig, EncoderSpec
from keras_moe.layers.expert_coefficients import ExpertCoefficients
from keras_moe.layers.experts import Experts
from keras_moe.layers.initializers import PerExpert
from keras_moe.layers.logit_scale import LogitScale
from keras_moe.layers.masked_pooling import MaskedPooling
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe import MoE
from keras_moe.layers.moe_config import MoEConfig, resolve_moe_layers
from keras_moe.layers.multilinear_experts import MultilinearExperts
from keras_moe.layers.mumoe import MuMoE
from keras_moe.layers.mumoe_block import MuMoEBlock
from keras_moe.layers.mumoe_config import MuMoEConfig, moe_config
from keras_moe.layers.normalization import LayerNorm
from keras_moe.layers.patch_embedding import (
    PatchEmbedding,
    fold_channels,
    resize_patch_kernel,
)
from keras_moe.layers.pooling import AttentionPooling, TokenPooling
from keras_moe.layers.position_embedding import (
    PositionEmbedding,
    resize_positions,
    sincos_table,
)
from keras_moe.layers.self_attention import SelfAttention
from keras_moe.layers.text_positions import TextPositions
from keras_moe.layers.token_embedding import TokenEmbedding
from keras_moe.layers.token_mlp import TokenMLP
from keras_moe.layers.token_mumoe import TokenMuMoE
from keras_moe.layers.zero_computation_experts import ZeroComputationExperts

__all__ = [
    "MLP",
    "AttentionPooling",
    "ClassToken",
    "EncoderBlock",
    "EncoderConfig",
    "EncoderSpec",
    "ExpertCoefficients",
    "Experts",
    "LayerNorm",
    "LayerScale",
    "LogitScale",
    "MaskedPooling",
    "MoE",
    "MoEConfig",
    "MoEEncoderBlock",
    "MuMoE",
    "MuMoEBlock",
    "MuMoEConfig",
    "MultilinearExperts",
    "PatchEmbedding",
    "PerExpert",
    "PositionEmbedding",
    "SelfAttention",
    "TextPositions",
    "TokenEmbedding",
    "TokenMLP",
    "TokenMuMoE",
    "TokenPooling",
    "ZeroComputationExperts",
    "fold_channels",
    "gelu_tanh",
    "moe_config",
    "quick_gelu",
    "resize_patch_kernel",
    "resize_positions",
    "resolve_moe_layers",
    "sincos_table",
]
