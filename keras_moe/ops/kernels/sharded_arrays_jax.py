"""Arrays on several devices or processes, made piece by piece on JAX."""

from collections.abc import Callable
from typing import Any

import numpy as np


def process_shard() -> tuple[int, int]:
    """This process's index, and the number of processes."""
    import jax

    return jax.process_index(), jax.process_count()


def place_like(value: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
    """A new array with the sharding of another one, from the pieces of this process.

    `keras.distribution.distribute_tensor` has the same result, but needs the whole
    array on every process.
    """
    import jax

    return jax.make_array_from_callback(
        value.shape, value.sharding, lambda index: read(index).astype(value.dtype)
    )


def placed(value: np.ndarray, sharding: Any) -> Any:
    """An array on the devices of all processes, each of which has the whole value."""
    import jax

    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def with_shards(value: Any) -> Any:
    """An array whose `addressable_shards` can be read, with the same values.

    With one device in each process, `jax.device_put` of a local array to all processes
    gives an array whose shards JAX (0.10.2) does not find. Keras initializes biases
    this way.
    """
    try:
        value.addressable_shards  # noqa: B018
    except ValueError:
        # Only whole arrays are affected.
        whole = np.asarray(value)
        return place_like(value, lambda index: whole[index])
    return value


def exchange(content: bytes) -> list[bytes]:
    """The contents of all processes, in each of them; all must call it together."""
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.array([len(content)], "int32"))
    sizes = np.ravel(sizes)
    padded = np.zeros(int(sizes.max()), "uint8")
    padded[: len(content)] = np.frombuffer(content, "uint8")
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [row[:size].tobytes() for row, size in zip(rows, sizes)]
