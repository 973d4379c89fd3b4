"""Features and labels as NumPy arrays, checked.

Axes: N examples, F feature dim.
"""

from typing import Any

import keras
import numpy as np

# The number of indices that an error names.
NAMED = 5


def to_numpy(array: Any) -> np.ndarray:
    """An array or a tensor of any library as a NumPy array."""
    # A tensor of the backend may sit on an accelerator or ask for gradients; one of
    # tf.data may belong to another backend.
    if keras.ops.is_tensor(array):
        return keras.ops.convert_to_numpy(array)
    return np.asarray(array)


def non_finite(array: np.ndarray) -> np.ndarray:
    """The indices along the first axis at which a value is NaN or infinite."""
    if array.dtype.kind in "biu":
        return np.array([], "int64")
    # np.isfinite does not know bfloat16.
    values = array if array.dtype.kind == "f" else array.astype("float32")
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))


def check_real(name: str, array: Any) -> np.ndarray:
    """An array or a tensor as a NumPy array, if its numbers are real."""
    array = to_numpy(array)
    # Extended floats, such as bfloat16, are of kind "V".
    if array.dtype.kind not in "fiubV" or array.dtype.names is not None:
        raise ValueError(
            f"Expected {name} of real numbers; received: dtype={array.dtype}"
        )
    return array


def check_matrix(name: str, array: Any) -> np.ndarray:
    """Rows of examples (N, F) as a NumPy array, if there are any."""
    array = check_real(name, array)
    if array.ndim != 2 or not array.size:
        raise ValueError(
            f"Expected {name} of shape (examples, dim), neither of them 0; "
            f"received: shape={array.shape}"
        )
    return array


def check_features(name: str, features: Any, dim: int | None = None) -> np.ndarray:
    """Features as float64 (N, F), if they are finite, and F is `dim` unless None."""
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
    """Labels as int64 (N,), if they are in range and N is `length` unless None."""
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
