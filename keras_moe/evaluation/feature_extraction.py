"""The features of a model for all images of a data set of any kind.

Axes: N examples, F feature dim.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_moe.evaluation.feature_checks import (
    NAMED,
    check_features,
    non_finite,
    to_numpy,
)
from keras_moe.processes import predict_batch


def extract_features(
    name: str, model: Callable, data: Any, batch_size: int, verbose: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a model over all batches, which are the same in each of several
    processes.
    """
    if not callable(model):
        raise ValueError(
            f"Expected a keras.Model or a callable; received: model={model!r}"
        )
    # A model's own prediction step is compiled; a call of the model is not.
    is_model, size = isinstance(model, keras.Model), 0
    batches, num_batches = _batches(name, data, batch_size)
    progress = keras.utils.Progbar(num_batches, verbose=verbose, unit_name="batch")
    features, labels, bad_images, seen = [], [], [], 0
    for index, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"Expected {name} to give batches (images, labels); "
                f"received: {type(batch).__name__}"
            )
        # A tensor of tf.data means nothing to a model of another backend.
        images = to_numpy(batch[0])
        bad = non_finite(images)
        bad_images.extend(bad + seen)
        # All bad images are reported: after the first the others are read, not run.
        if not bad_images:
            size = max(size, len(images))
            output = predict_batch(model, images, size) if is_model else model(images)
            features.append(_check_output(name, output, len(images)))
        labels.append(to_numpy(batch[1]))
        if labels[-1].shape != (len(images),):
            raise ValueError(
                f"Expected {name} to give one integer label per image, of shape "
                f"({len(images)},); received: labels.shape={labels[-1].shape}"
            )
        seen += len(images)
        progress.update(index + 1)
    if not seen:
        raise ValueError(f"Expected at least one image in {name}; received: none")
    if num_batches is None:
        progress.update(index + 1, finalize=True)
    if bad_images:
        raise ValueError(
            f"Expected finite images in {name}; received: NaN or Inf in "
            f"{len(bad_images)} of {seen} images, first at indices "
            f"{[int(i) for i in bad_images[:NAMED]]}"
        )
    features = np.concatenate(features)
    return check_features(f"features of {name}", features), np.concatenate(labels)


def _batches(name: str, data: Any, batch_size: int) -> tuple[Iterator, int | None]:
    """An iterator of (images, labels), and how many batches it has if known."""
    if isinstance(data, keras.utils.PyDataset):
        return (data[i] for i in range(data.num_batches)), data.num_batches
    if isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "shape"):
        images, labels = to_numpy(data[0]), to_numpy(data[1])
        if not images.ndim or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"Expected {name} to have one integer label per image; received: "
                f"images.shape={images.shape}, labels.shape={labels.shape}"
            )
        starts = range(0, len(images), batch_size)
        sliced = (
            (images[i : i + batch_size], labels[i : i + batch_size]) for i in starts
        )
        return sliced, len(starts)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"Expected {name} to be a tuple (images, labels) of arrays or an iterable "
            f"of such batches; received: {type(data).__name__}"
        )
    # The cardinality is -1 for a data set that repeats for ever, -2 if not known.
    if hasattr(data, "cardinality"):
        length = int(data.cardinality())
    else:
        length = len(data) if hasattr(data, "__len__") else -2
    if length == -1:
        raise ValueError(
            f"Expected {name} to end; received: a data set that repeats for ever"
        )
    return iter(data), length if length >= 0 else None


def _check_output(name: str, output: Any, batch: int) -> np.ndarray:
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != batch:
        received = type(output).__name__ if shape is None else f"shape={tuple(shape)}"
        raise ValueError(
            f"Expected features of {name} of shape (batch, dim) = ({batch}, dim); "
            f"received: {received}"
        )
    return to_numpy(output)
