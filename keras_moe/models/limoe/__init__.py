"""One transformer for images and texts, with mixtures of experts: LIMoE."""

from keras_moe.models.limoe.backbone import LIMoEBackbone

__all__ = ["LIMoEBackbone"]
