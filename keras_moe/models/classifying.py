"""Names and probabilities for images of any size."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.models.image_preprocessor import ImagePreprocessor


class ClassProbability(NamedTuple):
    """A class of an image, and its probability.

    Attributes:
        name: the class's name, or its number as text where the model has no names.
        probability: the softmax or, for a multi-label model, the sigmoid.
        index: the class's number.
    """

    name: str
    probability: float
    index: int


def classify(
    classifier: keras.Model,
    images: Any,
    top: int = 5,
    batch_size: int = 32,
    max_value: float | None = None,
) -> list:
    """The most probable classes of images of any size."""
    top = check_integer("top", top)
    batch_size = check_integer("batch_size", batch_size)
    preprocessor = classifier.preprocessor
    if not isinstance(preprocessor, ImagePreprocessor):
        raise ValueError(
            "Expected a model with an ImagePreprocessor: set model.preprocessor = "
            "keras_moe.models.ImagePreprocessor(model.input_shape[1:]); received: "
            f"preprocessor={preprocessor!r}"
        )
    preprocessor.check_model(classifier.input_shape[1:], classifier.num_classes)
    prepared = preprocessor(images, max_value)
    if prepared.ndim == 3:
        return _classes(classifier, prepared[None], top, 1)[0]
    return _classes(classifier, prepared, top, batch_size)


def _classes(classifier, prepared, top, batch_size):
    if not len(prepared):
        return []
    outputs = classifier.predict(prepared, batch_size=batch_size, verbose=0)
    probabilities = _probabilities(classifier, outputs.astype("float64"))
    names = classifier.preprocessor.class_names
    results = []
    for row in probabilities:
        # Stable: among equals the lower number comes first.
        order = np.argsort(-row, kind="stable")[:top]
        results.append(
            [
                ClassProbability(names[i] if names else str(i), float(row[i]), int(i))
                for i in order
            ]
        )
    return results


def _probabilities(classifier, outputs):
    if classifier.output_activation is not None:
        return outputs
    if classifier.multi_label:
        # No exponential of a large number.
        return 0.5 * (1.0 + np.tanh(0.5 * outputs))
    outputs = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return outputs / outputs.sum(axis=-1, keepdims=True)
