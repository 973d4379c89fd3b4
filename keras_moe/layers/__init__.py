"""Layers: experts, the MoE layer, encoder blocks, embeddings and pooling."""

from keras_moe.layers.activations import gelu_tanh, quick_gelu
from keras_moe.layers.attention import Attention, CausalMask
from keras_moe.layers.block import Block, LayerScale, MoEBlock
from keras_moe.layers.experts import Experts, ZeroComputationExperts
from keras_moe.layers.logit_scale import LogitScale
from keras_moe.layers.mlp import MLP, TokenMLP
from keras_moe.layers.moe import MoE
from keras_moe.layers.moe_config import (
    MoEConfig,
    MuMoEConfig,
    resolve_moe_layers,
)
from keras_moe.layers.multilinear_experts import ExpertCoefficients, MultilinearExperts
from keras_moe.layers.mumoe import MuMoE, MuMoEBlock, TokenMuMoE
from keras_moe.layers.normalization import LayerNorm, RMSNorm
from keras_moe.layers.patch_embedding import (
    ClassToken,
    PatchEmbedding,
    RegisterTokens,
    fold_channels,
    resize_patch_kernel,
)
from keras_moe.layers.pooling import AttentionPooling, MaskedPooling, TokenPooling
from keras_moe.layers.position_embedding import (
    PositionEmbedding,
    RotaryEmbedding2D,
    resize_positions,
)
from keras_moe.layers.text_embedding import (
    ReversibleTokenEmbedding,
    TextPositions,
    TokenEmbedding,
)
from keras_moe.layers.tower_config import TowerConfig, TowerSpec
from keras_moe.ops._initializers import PerExpert

__all__ = [
    "MLP", "Attention", "AttentionPooling", "Block", "CausalMask", "ClassToken",
    "ExpertCoefficients", "Experts", "LayerNorm", "LayerScale", "LogitScale",
    "MaskedPooling", "MoE", "MoEBlock", "MoEConfig", "MuMoE", "MuMoEBlock",
    "MuMoEConfig", "MultilinearExperts", "PatchEmbedding", "PerExpert",
    "PositionEmbedding", "RMSNorm", "RegisterTokens", "ReversibleTokenEmbedding",
    "RotaryEmbedding2D", "TextPositions", "TokenEmbedding", "TokenMLP", "TokenMuMoE",
    "TokenPooling", "TowerConfig", "TowerSpec", "ZeroComputationExperts",
    "fold_channels", "gelu_tanh", "quick_gelu", "resize_patch_kernel",
    "resize_positions", "resolve_moe_layers",
]  # fmt: skip
__dir__ = __all__.copy
