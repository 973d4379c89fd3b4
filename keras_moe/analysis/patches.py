"""The tokens of an image that are its patches."""

from typing import Any

import numpy as np


def of_patches(values: Any, grid: tuple[int, int]) -> np.ndarray:
    """The values that belong to patches, without those of a class token before them."""
    values, count = np.asarray(values), grid[0] * grid[1]
    tokens = values.shape[1] if values.ndim > 1 else 0
    if tokens not in (count, count + 1):
        raise ValueError(
            f"Expected arrays (batch, {count} or {count + 1} tokens, ...) for "
            f"grid={grid}; received: {tokens} tokens, shape={values.shape}"
        )
    return values[:, -count:]
