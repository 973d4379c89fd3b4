"""Keras's own `fit`, `evaluate` and `predict` for tasks, in the place of KerasHub's.

KerasHub's turn all data into one kind of dataset, in order to map a preprocessor over
it: they know no `PyDataset`, `DataLoader` or generator, and do not shuffle arrays. Only
a `keras_hub.models.Preprocessor` needs them; any other preprocessor is applied where
its owner calls it.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub


def has_keras_hub_preprocessor(task: keras_hub.models.Task) -> bool:
    """Whether KerasHub prepares the inputs: they are not yet those of the model."""
    return isinstance(task.preprocessor, keras_hub.models.Preprocessor)


def training_method(task: keras_hub.models.Task, name: str) -> Callable:
    """The method that trains or evaluates a task."""
    owner = keras.Model
    if has_keras_hub_preprocessor(task):
        owner = keras_hub.models.Task
    return functools.partial(getattr(owner, name), task)


def preprocessed_batch(
    task: keras_hub.models.Task, x: Any, y: Any = None, sample_weight: Any = None
) -> Any:
    """A batch for the model: as it is, without a preprocessor of KerasHub."""
    if has_keras_hub_preprocessor(task):
        return keras_hub.models.Task.preprocess_samples(task, x, y, sample_weight)
    return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
