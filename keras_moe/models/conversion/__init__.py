"""Conversion of published weights, one file per source."""

from keras_moe.models.conversion._spec import HEAD, POOLING
from keras_moe.models.conversion.published_weights import (
    ConversionReport,
    ConvertedWeight,
    PublishedWeights,
)
from keras_moe.models.conversion.sources import (
    check_convertible,
    is_convertible,
    open_source,
)

__all__ = [
    "HEAD", "POOLING", "ConversionReport", "ConvertedWeight", "PublishedWeights",
    "check_convertible", "is_convertible", "open_source",
]  # fmt: skip
