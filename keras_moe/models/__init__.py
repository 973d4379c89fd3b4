"""The model zoo: backbones, tasks and presets. Needs KerasHub."""

from keras_moe.models._late_imports import tensorflow_on_demand

with tensorflow_on_demand():
    import keras_hub  # noqa: F401

from keras_moe.models.backbones.base import ImageBackbone, MoEBackbone
from keras_moe.models.backbones.clip import CLIPBackbone
from keras_moe.models.backbones.config import ImageConfig, TransformerConfig
from keras_moe.models.backbones.decoder import DecoderBackbone
from keras_moe.models.backbones.limoe import LIMoEBackbone
from keras_moe.models.backbones.mixer import MixerBackbone
from keras_moe.models.backbones.text import TextBackbone
from keras_moe.models.backbones.tower import Tower, TowerOutputs, image_tower
from keras_moe.models.backbones.vit import ViTBackbone
from keras_moe.models.base.model_card import CardResult, ModelCard, upload
from keras_moe.models.conversion import ConversionReport, ConvertedWeight
from keras_moe.models.export import export_weights
from keras_moe.models.loading.blueprint import Blueprint, Description, Part, resolve
from keras_moe.models.preprocessing.images import ImagePreprocessor
from keras_moe.models.preprocessing.patches import pad_patches
from keras_moe.models.preprocessing.tokenizer import TextTokenizer, pack
from keras_moe.models.presets import (
    abstract,
    convert,
    describe,
    from_preset,
    list_presets,
)
from keras_moe.models.registry import (
    VARIANTS,
    Variant,
    builtin_presets,
    register_backbone,
    register_presets,
    register_task,
)
from keras_moe.models.tasks.base import MoETask
from keras_moe.models.tasks.causal_lm import CausalLM, Perplexity
from keras_moe.models.tasks.contrastive import ContrastiveAccuracy, ContrastiveModel
from keras_moe.models.tasks.image_classifier import (
    ClassProbability,
    ImageClassifier,
    MixerImageClassifier,
    ViTImageClassifier,
)
from keras_moe.models.tasks.teacher_features import TeacherFeatures

__all__ = [
    "VARIANTS", "Blueprint", "CLIPBackbone", "CardResult", "CausalLM",
    "ClassProbability", "ContrastiveAccuracy", "ContrastiveModel", "ConversionReport",
    "ConvertedWeight", "DecoderBackbone", "Description", "ImageBackbone",
    "ImageClassifier", "ImageConfig", "ImagePreprocessor", "LIMoEBackbone",
    "MixerBackbone", "MixerImageClassifier", "MoEBackbone", "MoETask", "ModelCard",
    "Part", "Perplexity", "TeacherFeatures", "TextBackbone", "TextTokenizer", "Tower",
    "TowerOutputs", "TransformerConfig", "Variant", "ViTBackbone", "ViTImageClassifier",
    "abstract", "convert", "describe", "export_weights", "from_preset", "image_tower",
    "list_presets", "pack", "pad_patches", "register_backbone", "register_presets",
    "register_task", "resolve", "upload",
]  # fmt: skip
__dir__ = __all__.copy

register_presets(builtin_presets())
