"""Transformers of texts: dense, and with mixtures of experts; and their tokenizers."""

from keras_moe.models.text.backbone import TextBackbone
from keras_moe.models.text.tokenizer import TextTokenizer

__all__ = ["TextBackbone", "TextTokenizer"]
