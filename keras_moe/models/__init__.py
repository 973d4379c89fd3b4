"""The model zoo: backbones, tasks and presets. Needs KerasHub."""

from keras_moe.models.description import Description, Part
from keras_moe.models.presets import describe, from_preset, list_presets
from keras_moe.models.variants import VARIANTS, Variant
from keras_moe.models.vit import ViTBackbone, ViTImageClassifier

__all__ = [
    "VARIANTS",
    "Description",
    "Part",
    "Variant",
    "ViTBackbone",
    "ViTImageClassifier",
    "describe",
    "from_preset",
    "list_presets",
]
