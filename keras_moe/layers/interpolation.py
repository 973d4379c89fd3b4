"""Resizing along one axis, as matrices: values (new) = weights (new, old) @ values.

Functions with `start` and `count` make only these rows of the matrix, for a cut-out.
"""

import numpy as np

INTERPOLATIONS = ("bilinear", "bicubic")


def aligned_linear_weights(old: int, new: int) -> np.ndarray:
    """Linear interpolation whose first and last points stay the first and last."""
    return _hat(np.linspace(0.0, old - 1, new), old)


def linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation between the pixels' centres, without antialiasing."""
    return _hat(np.clip(_centres(old, new, start, count), 0, old - 1), old)


def widened_linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation, widened where it shrinks: Pillow's antialiasing."""
    x = _distances(old, new, start, count)
    weights = np.maximum(1.0 - x, 0.0)
    return weights / np.sum(weights, axis=1, keepdims=True)


def cubic_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Keys's cubic (a = -1/2) between the pixels' centres, widened where it shrinks."""
    x = _distances(old, new, start, count)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    # Part of the kernel is outside at the border.
    return weights / np.sum(weights, axis=1, keepdims=True)


def _distances(old, new, start, count):
    """Distances of new pixels' centres from old ones, in new pixels if it shrinks."""
    centres = _centres(old, new, start, count)
    return np.abs(centres[:, None] - np.arange(old)) / max(old / new, 1.0)


def _centres(old, new, start, count):
    """The places of the new pixels' centres, in old pixels."""
    stop = new if count is None else start + count
    return (np.arange(start, stop) + 0.5) * old / new - 0.5


def _hat(place, old):
    return np.maximum(1.0 - np.abs(place[:, None] - np.arange(old)), 0.0)
