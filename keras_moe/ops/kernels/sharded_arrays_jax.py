"""Arrays that lie on several devices or processes: made piece by piece, on JAX."""

from collections.abc import Callable
from typing import Any

import numpy as np


def place_like(value: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
    """A new array that lies where another one does, of the pieces that this one needs.

    `keras.distribution.distribute_tensor` has the same result, of a whole array on
    every process.

    Args:
        value: a `jax.Array`, whose shape, dtype and sharding the new one gets.
        read: gives the piece at a tuple of slices. It is asked for those of this
            process's devices only.

    Returns:
        A `jax.Array`.
    """
    import jax

    return jax.make_array_from_callback(
        value.shape, value.sharding, lambda index: read(index).astype(value.dtype)
    )
