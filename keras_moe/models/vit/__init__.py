"""Vision transformers: dense (ViT) and with mixtures of experts (V-MoE, Soft MoE)."""

from keras_moe.models.vit.backbone import ViTBackbone
from keras_moe.models.vit.image_classifier import ViTImageClassifier

__all__ = ["ViTBackbone", "ViTImageClassifier"]
