"""The model zoo: backbones, tasks and presets. Needs KerasHub."""

from keras_moe.models.backbone import MoEBackbone
from keras_moe.models.classifying import ClassProbability
from keras_moe.models.conversion import ConversionReport, ConvertedWeight, convert
from keras_moe.models.description import Description, Part
from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.mixer import MixerBackbone, MixerImageClassifier
from keras_moe.models.presets import describe, from_preset, list_presets
from keras_moe.models.tower import Tower, TowerOutputs
from keras_moe.models.variants import VARIANTS, Variant
from keras_moe.models.vit import ViTBackbone, ViTImageClassifier

__all__ = [
    "VARIANTS",
    "ClassProbability",
    "ConversionReport",
    "ConvertedWeight",
    "Description",
    "ImageClassifier",
    "ImagePreprocessor",
    "MixerBackbone",
    "MixerImageClassifier",
    "MoEBackbone",
    "Part",
    "Tower",
    "TowerOutputs",
    "Variant",
    "ViTBackbone",
    "ViTImageClassifier",
    "convert",
    "describe",
    "from_preset",
    "list_presets",
]
