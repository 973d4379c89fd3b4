"""Computations on groups of tokens that lie on several devices."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree


def on_several_devices() -> bool:
    """Whether a distribution over more than one device is set."""
    distribution = keras.distribution.distribution()
    return distribution is not None and distribution.device_mesh.devices.size > 1


def by_group(function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)`, on several devices as a batch over the groups.

    On one device it is fastest to flatten all groups into one table. A partitioner
    then cannot know that an index stays within its group, and gathers all groups on
    every device; as a batch over groups, each device computes its own.
    """
    if not on_several_devices():
        return function(*arrays)
    is_present = [x is not None for x in arrays]

    def for_group(present):
        present = iter(present)
        group = [ops.expand_dims(next(present), 0) if x else None for x in is_present]
        return tree.map_structure(lambda x: x[0], function(*group))

    return ops.vectorized_map(for_group, [x for x in arrays if x is not None])
