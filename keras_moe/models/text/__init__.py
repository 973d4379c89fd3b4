"""Transformers of texts: dense, and with mixtures of experts."""

from keras_moe.models.text.backbone import TextBackbone

__all__ = ["TextBackbone"]
