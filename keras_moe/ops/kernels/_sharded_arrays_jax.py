"""Arrays on several devices or processes, on JAX."""

from typing import Any

import numpy as np


def process_shard() -> tuple[int, int]:
    """This process's index, and the number of processes."""
    import jax

    return jax.process_index(), jax.process_count()


def placed(value: np.ndarray, sharding: Any) -> Any:
    """An array on the devices of all processes, each of which has all values."""
    import jax

    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def with_shards(value: Any) -> Any:
    """The same array, with readable `addressable_shards`.

    With one device per process, JAX (0.10.2) does not find the shards of a local array
    put to all processes, as Keras does with biases.
    """
    try:
        value.addressable_shards  # noqa: B018
    except ValueError:
        # Only whole arrays are affected.
        return placed(np.asarray(value), value.sharding)
    return value


def exchange(content: bytes) -> list[bytes]:
    """All-gathers bytes: every process must call it, and gets those of all."""
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.array([len(content)], "int32"))
    sizes = np.ravel(sizes)
    padded = np.zeros(int(sizes.max()), "uint8")
    padded[: len(content)] = np.frombuffer(content, "uint8")
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [row[:size].tobytes() for row, size in zip(rows, sizes)]
