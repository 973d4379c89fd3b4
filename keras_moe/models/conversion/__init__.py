"""Published weights as models of this library."""

from keras_moe.models.conversion.published_weights import PublishedWeights
from keras_moe.models.conversion.report import ConversionReport, ConvertedWeight
from keras_moe.models.conversion.sources import (
    check_convertible,
    is_convertible,
    open_source,
)

__all__ = [
    "ConversionReport",
    "ConvertedWeight",
    "PublishedWeights",
    "check_convertible",
    "is_convertible",
    "open_source",
]
