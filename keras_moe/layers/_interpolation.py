"""Interpolation along one axis as matrices: new = weights (new, old) @ old.

`start` and `count` select rows of the matrix, for crops.
"""

import numpy as np

INTERPOLATIONS = ("bilinear", "bicubic")


def aligned_linear_weights(old: int, new: int) -> np.ndarray:
    """Linear interpolation with aligned corners."""
    return _hat(np.linspace(0.0, old - 1, new), old)


def linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation between pixel centres, without antialiasing."""
    return _hat(np.clip(_centres(old, new, start, count), 0, old - 1), old)


def widened_linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation with Pillow's antialiasing when shrinking."""
    x = _distances(old, new, start, count)
    weights = np.maximum(1.0 - x, 0.0)
    return weights / np.sum(weights, axis=1, keepdims=True)


def cubic_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Keys's cubic interpolation (a = -1/2), antialiased when shrinking."""
    x = _distances(old, new, start, count)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    # At the border part of the kernel lies outside.
    return weights / np.sum(weights, axis=1, keepdims=True)


def _distances(old, new, start, count):
    """Distances from new to old pixel centres, in kernel units."""
    centres = _centres(old, new, start, count)
    return np.abs(centres[:, None] - np.arange(old)) / max(old / new, 1.0)


def _centres(old, new, start, count):
    """Centres of the new pixels, in old pixel coordinates."""
    stop = new if count is None else start + count
    return (np.arange(start, stop) + 0.5) * old / new - 0.5


def _hat(place, old):
    return np.maximum(1.0 - np.abs(place[:, None] - np.arange(old)), 0.0)
