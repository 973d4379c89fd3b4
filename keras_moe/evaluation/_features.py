"""Checks of features (N, F) and labels of N examples."""

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import unfit

# Number of indices that an error lists.
NAMED = 5


def to_numpy(array: object) -> np.ndarray:
    """Converts an array or a tensor of any library to NumPy."""
    # The backend's tensors may be on an accelerator or require gradients; those of
    # tf.data may belong to another backend.
    if keras.ops.is_tensor(array):
        return keras.ops.convert_to_numpy(array)
    return np.asarray(array)


def check_matrix(name: str, array: ArrayLike, dim: int | None = None) -> np.ndarray:
    """Checks that an array is a non-empty matrix (N, `dim`) of real numbers."""
    array = to_numpy(array)
    # bfloat16 is of kind "V".
    is_real = array.dtype.kind in "fiubV"
    fits = array.ndim == 2 and array.size and dim in (None, array.shape[1])
    if not is_real or not fits:
        expected = f"{name}, real numbers of shape (examples, {dim or 'dim'})"
        raise unfit(expected, f"shape={array.shape}, dtype={array.dtype}")
    return array


def check_features(
    name: str, features: ArrayLike, dim: int | None = None
) -> np.ndarray:
    """Checks that features (N, F) are finite; returns float64."""
    features = check_matrix(name, features, dim).astype("float64")
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if bad.size:
        raise ValueError(
            f"Expected finite {name}; received: NaN or Inf in {bad.size} of "
            f"{len(features)} rows, first at indices {bad[:NAMED].tolist()}"
        )
    return features


def check_labels(
    name: str, labels: ArrayLike, length: int | None, num_classes: int | None = None
) -> np.ndarray:
    """Checks that labels (N,) are integers in range; returns int64."""
    labels = to_numpy(labels)
    fits = labels.ndim == 1 and labels.size and length in (None, len(labels))
    if not fits or labels.dtype.kind not in "iu":
        expected = f"{name}, integers of shape ({length or 'examples'},)"
        raise unfit(expected, f"shape={labels.shape}, dtype={labels.dtype}")
    highest = np.inf if num_classes is None else num_classes - 1
    outside = labels[(labels < 0) | (labels > highest)]
    if outside.size:
        expected = ">= 0" if num_classes is None else f"in [0, {num_classes})"
        raise ValueError(
            f"Expected {name} {expected}; received: {int(outside[0])}, and "
            f"{outside.size} out of range in all"
        )
    return labels.astype("int64")
