"""The model zoo: backbones, tasks and presets. Needs KerasHub."""

from keras_moe.models.late_imports import loaded_on_demand

# KerasHub imports these for its `tf.data` layers. Listed are the names that it accesses
# at import time; its tokenizer cache works without the base class `tf.Module`.
with loaded_on_demand(
    {
        "tensorflow": ("executing_eagerly",),
        "tensorflow_text": (),
        "tensorflow_text.tools": (),
        "tensorflow_text.tools.wordpiece_vocab": ("wordpiece_tokenizer_learner_lib",),
    },
    absent=("Module",),
):
    import keras_hub  # noqa: F401

from keras_moe.models.backbone import ImageBackbone, MoEBackbone
from keras_moe.models.backbone_config import ImageConfig, TransformerConfig
from keras_moe.models.causal_lm import CausalLM, Perplexity
from keras_moe.models.clip import CLIPBackbone
from keras_moe.models.contrastive_metrics import ContrastiveAccuracy
from keras_moe.models.contrastive_model import ContrastiveModel
from keras_moe.models.conversion import ConversionReport, ConvertedWeight
from keras_moe.models.conversion.export import export_weights
from keras_moe.models.decoder import DecoderBackbone
from keras_moe.models.description import Description, Part
from keras_moe.models.image_classifier import ClassProbability, ImageClassifier
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.keras_hub_experts import replace_moe
from keras_moe.models.limoe import LIMoEBackbone
from keras_moe.models.mixer import MixerBackbone, MixerImageClassifier
from keras_moe.models.model_card import CardResult, ModelCard, upload
from keras_moe.models.packing import pack
from keras_moe.models.presets import (
    abstract,
    convert,
    describe,
    from_preset,
    list_presets,
)
from keras_moe.models.registry import (
    builtin_presets,
    register_backbone,
    register_presets,
    register_task,
)
from keras_moe.models.source import Blueprint, resolve
from keras_moe.models.task import MoETask
from keras_moe.models.text import TextBackbone
from keras_moe.models.text_tokenizer import TextTokenizer
from keras_moe.models.tower import Tower, TowerOutputs, image_tower
from keras_moe.models.variants import VARIANTS, Variant
from keras_moe.models.vit import ViTBackbone, ViTImageClassifier

__all__ = [
    "VARIANTS",
    "Blueprint",
    "CLIPBackbone",
    "CardResult",
    "CausalLM",
    "ClassProbability",
    "ContrastiveAccuracy",
    "ContrastiveModel",
    "ConversionReport",
    "ConvertedWeight",
    "DecoderBackbone",
    "Description",
    "ImageBackbone",
    "ImageClassifier",
    "ImageConfig",
    "ImagePreprocessor",
    "LIMoEBackbone",
    "MixerBackbone",
    "MixerImageClassifier",
    "MoEBackbone",
    "MoETask",
    "ModelCard",
    "Part",
    "Perplexity",
    "TextBackbone",
    "TextTokenizer",
    "Tower",
    "TowerOutputs",
    "TransformerConfig",
    "Variant",
    "ViTBackbone",
    "ViTImageClassifier",
    "abstract",
    "convert",
    "describe",
    "export_weights",
    "from_preset",
    "image_tower",
    "list_presets",
    "pack",
    "register_backbone",
    "register_presets",
    "register_task",
    "replace_moe",
    "resolve",
    "upload",
]

register_presets(builtin_presets())
