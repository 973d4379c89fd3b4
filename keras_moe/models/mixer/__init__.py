"""MLP-Mixer: dense, and with mixtures of experts in any block."""

from keras_moe.models.mixer.backbone import MixerBackbone
from keras_moe.models.mixer.image_classifier import MixerImageClassifier

__all__ = ["MixerBackbone", "MixerImageClassifier"]
