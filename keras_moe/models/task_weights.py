"""The weights of a task's head, without the optimizer.

KerasHub would store the optimizer's state beside them: three times the size, and a
warning when they are loaded.
"""

import os

import keras
import keras_hub

from keras_moe.compat import flatten_layers
from keras_moe.models.weights_file import checked_weights, save_weights


def save_task_weights(task: keras_hub.models.Task, filepath: str | os.PathLike) -> None:
    """Saves the weights that are not the backbone's."""
    save_weights(task, filepath, objects_to_skip=_not_the_head(task))


def load_task_weights(task: keras_hub.models.Task, filepath: str | os.PathLike) -> None:
    """Loads the weights that are not the backbone's."""
    with checked_weights(filepath):
        keras.saving.load_weights(task, filepath, objects_to_skip=_not_the_head(task))


def _not_the_head(task):
    skipped = flatten_layers(task.backbone)
    # There is none with compile=False.
    optimizer = getattr(task, "optimizer", None)
    return skipped if optimizer is None else [*skipped, optimizer]
