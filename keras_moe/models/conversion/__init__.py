"""Weights that others have published, as models of ours."""

from keras_moe.models.conversion.convert import convert, convert_to, model_arguments
from keras_moe.models.conversion.report import ConversionReport, ConvertedWeight
from keras_moe.models.conversion.sources import is_convertible, open_source

__all__ = [
    "ConversionReport",
    "ConvertedWeight",
    "convert",
    "convert_to",
    "is_convertible",
    "model_arguments",
    "open_source",
]
