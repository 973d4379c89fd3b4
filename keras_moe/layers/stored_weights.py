"""Large weights, read from their file into the memory in which they stay."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_moe.compat import stored_dataset
from keras_moe.ops.kernels import host_memory


def assign_stored(variable: keras.Variable, store: Mapping[str, Any], key: str) -> None:
    """Assigns a stored array to a weight, and makes no other copy of it.

    A store gives arrays that are two copies at once while they are read, and the weight
    becomes another. The kernels of all experts are the largest weights of a model.
    """
    dataset = stored_dataset(store, key)
    if not _is_like(dataset, variable):
        variable.assign(store[key])
        return
    memory = host_memory.memory_of(variable)
    if memory is not None:
        dataset.read_direct(memory)
        return
    values = host_memory.zeros(dataset.shape, dataset.dtype)
    dataset.read_direct(values)
    variable.assign(host_memory.to_tensor(values))


def _is_like(dataset, variable):
    """Whether the bytes of an array are those of the weight."""
    return (
        dataset is not None
        and dataset.size > 0
        and tuple(dataset.shape) == tuple(variable.shape)
        and dataset.dtype.isnative
        and dataset.dtype.name == variable.dtype
        and keras.distribution.distribution() is None
    )
