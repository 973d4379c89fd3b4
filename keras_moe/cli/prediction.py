"""The outputs of a model for all images of a split, beside their labels."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np


def predict(
    model: keras.Model, batches: Iterable, batch_size: int
) -> tuple[Any, np.ndarray]:
    """Predicts batch by batch.

    A last batch is filled up with its last image, so that nothing is compiled for it
    and devices can share it.
    """
    outputs, labels = [], []
    for images, batch_labels in batches:
        images, count = np.asarray(images), len(images)
        padding = np.repeat(images[-1:], batch_size - count, axis=0)
        output = model.predict_on_batch(np.concatenate([images, padding]))
        outputs.append(keras.tree.map_structure(lambda x, n=count: x[:n], output))
        labels.append(np.asarray(batch_labels))
    whole = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)
    return whole, np.concatenate(labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest logit is that of their class."""
    return float((logits.argmax(axis=-1) == labels).mean())
