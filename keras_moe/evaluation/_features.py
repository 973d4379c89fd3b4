"""Validates features and labels, and extracts features from a model.

Axes: N examples, F feature dim.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_moe.processes import predict_batch

# Number of indices that an error lists.
NAMED = 5


def to_numpy(array: Any) -> np.ndarray:
    """Converts an array or a tensor of any library to NumPy."""
    # The backend's tensors may be on an accelerator or require gradients; those of
    # tf.data may belong to another backend.
    if keras.ops.is_tensor(array):
        return keras.ops.convert_to_numpy(array)
    return np.asarray(array)


def non_finite(array: np.ndarray) -> np.ndarray:
    """Indices along the first axis at which a value is NaN or infinite."""
    if array.dtype.kind in "biu":
        return np.array([], "int64")
    # np.isfinite does not support bfloat16.
    values = array if array.dtype.kind == "f" else array.astype("float32")
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))


def check_real(name: str, array: Any) -> np.ndarray:
    """Converts to NumPy and checks that numbers are real."""
    array = to_numpy(array)
    # bfloat16 is of kind "V".
    if array.dtype.kind not in "fiubV" or array.dtype.names is not None:
        raise ValueError(
            f"Expected {name} of real numbers; received: dtype={array.dtype}"
        )
    return array


def check_matrix(name: str, array: Any) -> np.ndarray:
    """Checks that an array is a non-empty matrix (N, F)."""
    array = check_real(name, array)
    if array.ndim != 2 or not array.size:
        raise ValueError(
            f"Expected {name} of shape (examples, dim), neither of them 0; "
            f"received: shape={array.shape}"
        )
    return array


def check_features(name: str, features: Any, dim: int | None = None) -> np.ndarray:
    """Checks that features (N, F) are finite; returns float64."""
    features = check_matrix(name, features).astype("float64")
    if dim is not None and features.shape[1] != dim:
        raise ValueError(
            f"Expected {name} with the {dim} features of the training set; "
            f"received: shape={features.shape}"
        )
    bad = non_finite(features)
    if bad.size:
        raise ValueError(
            f"Expected finite {name}; received: NaN or Inf in {bad.size} of "
            f"{len(features)} rows, first at indices {bad[:NAMED].tolist()}"
        )
    return features


def check_labels(
    name: str, labels: Any, length: int | None, num_classes: int | None = None
) -> np.ndarray:
    """Checks that labels (N,) are integers in range; returns int64."""
    labels = to_numpy(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        raise ValueError(
            f"Expected {name} of shape (examples,), integers; received: "
            f"shape={labels.shape}, dtype={labels.dtype}"
        )
    if length is not None and len(labels) != length:
        raise ValueError(
            f"Expected {name} for {length} examples; received: shape={labels.shape}"
        )
    highest = np.inf if num_classes is None else num_classes - 1
    outside = labels[(labels < 0) | (labels > highest)]
    if outside.size:
        expected = ">= 0" if num_classes is None else f"in [0, {num_classes})"
        raise ValueError(
            f"Expected {name} {expected}; received: {int(outside[0])}, and "
            f"{outside.size} out of range in all"
        )
    return labels.astype("int64")


def extract_features(
    name: str, model: Callable, data: Any, batch_size: int, verbose: int
) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of all batches, equal in all processes."""
    if not callable(model):
        raise ValueError(
            f"Expected a keras.Model or a callable; received: model={model!r}"
        )
    # A model's prediction step is compiled; calling the model is not.
    is_model, size = isinstance(model, keras.Model), 0
    batches, num_batches = _labelled_batches(name, data, batch_size)
    progress = keras.utils.Progbar(num_batches, verbose=verbose, unit_name="batch")
    features, labels, bad_images, seen = [], [], [], 0
    for index, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"Expected {name} to give batches (images, labels); "
                f"received: {type(batch).__name__}"
            )
        # The tensors of tf.data may belong to another backend.
        images = to_numpy(batch[0])
        bad = non_finite(images)
        bad_images.extend(bad + seen)
        # After the first bad image, the rest is only checked, to report all of them.
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


def _labelled_batches(
    name: str, data: Any, batch_size: int
) -> tuple[Iterator, int | None]:
    """Iterator of (images, labels), and the number of batches if known."""
    if not (isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "shape")):
        return iterate_batches(name, data)
    images, labels = to_numpy(data[0]), to_numpy(data[1])
    if not images.ndim or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"Expected {name} to have one integer label per image; received: "
            f"images.shape={images.shape}, labels.shape={labels.shape}"
        )
    starts = range(0, len(images), batch_size)
    sliced = ((images[i : i + batch_size], labels[i : i + batch_size]) for i in starts)
    return sliced, len(starts)


def iterate_batches(name: str, data: Any) -> tuple[Iterator, int | None]:
    """Iterator over one pass of batches, and their number if known."""
    if isinstance(data, keras.utils.PyDataset):
        return (data[i] for i in range(data.num_batches)), data.num_batches
    if not isinstance(data, Iterable):
        raise ValueError(
            f"Expected {name} to be a tuple of arrays or an iterable of such batches; "
            f"received: {type(data).__name__}"
        )
    # The cardinality is -1 for infinite datasets and -2 if unknown.
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
