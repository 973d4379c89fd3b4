"""The names of the classes that a model is trained on."""

import dataclasses
from typing import Any

from keras_moe.models import ImagePreprocessor


def set_class_names(model: Any, names: tuple[str, ...] | None) -> None:
    """Gives a model's `ImagePreprocessor` the names of the classes it is trained on.

    Names that it has from its preset are those of other data and are dropped where
    `names` is None. A model without an `ImagePreprocessor` stays as it is.
    """
    preprocessor = getattr(model, "preprocessor", None)
    if isinstance(preprocessor, ImagePreprocessor):
        model.preprocessor = dataclasses.replace(preprocessor, class_names=names)
