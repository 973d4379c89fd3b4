"""Weights that others have published, as models of ours."""

from keras_moe.models.conversion.convert import convert
from keras_moe.models.conversion.report import ConversionReport, ConvertedWeight
from keras_moe.models.conversion.sources import is_convertible

__all__ = ["ConversionReport", "ConvertedWeight", "convert", "is_convertible"]
