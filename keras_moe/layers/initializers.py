"""Initializers for tensors that stack or fold several matrices."""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_initializer
from keras_moe.ops.initializers import host_values, skipped_value
from keras_moe.ops.kernels import host_memory
from keras_moe.ops.primitives import on_several_devices


@keras.saving.register_keras_serializable("keras_moe")
class PerExpert(keras.initializers.Initializer):
    """Initialises each expert's slice by itself, so that its fans are its own.

    An initializer that sees (E, D, H) takes E for a kernel's spatial size and makes
    the weights too small.

    Args:
        initializer: initializer of one expert's slice.
        shared: whether all experts get the same values, as in V-MoE: they then differ
            by their tokens alone.

    Example:

    >>> from keras_moe.layers import PerExpert
    >>> PerExpert("glorot_uniform")((4, 8, 16)).shape == (4, 8, 16)
    True
    """

    def __init__(self, initializer: Any, shared: bool = False):
        self.initializer = check_initializer("initializer", initializer)
        self.shared = shared

    def __call__(self, shape, dtype=None):
        skipped = skipped_value(self.initializer, shape, dtype)
        if skipped is not None:
            return skipped
        num_experts, *shape = shape
        first = host_values(self._initializer(0), shape, dtype)
        if first is not None:
            # Each expert's values go to their place: all of them are there once.
            values = host_memory.zeros((num_experts, *shape), first.dtype)
            # Shared values are drawn once.
            values[:] = first
            for index in range(1, 1 if self.shared else num_experts):
                values[index] = host_values(self._initializer(index), shape, dtype)
            return host_memory.to_tensor(values)
        if self.shared:
            value = self.initializer(shape, dtype=dtype)
            return ops.tile(value[None], [num_experts] + [1] * len(shape))
        slices = [
            self._initializer(index)(shape, dtype=dtype) for index in range(num_experts)
        ]
        if not on_several_devices():
            return ops.stack(slices)
        # XLA would make the whole stack on every device along which its axis is split.
        place = ops.arange(num_experts, dtype="int32")
        place = ops.reshape(place, (-1, *(1 for _ in shape)))
        value = 0.0
        for index, matrix in enumerate(slices):
            value = ops.where(place == index, matrix, value)
        return ops.cast(value, dtype or keras.config.floatx())

    def _initializer(self, index):
        seed = getattr(self.initializer, "seed", None)
        if self.shared or not isinstance(seed, int):
            # Constants have no seed, and a SeedGenerator moves on by itself.
            return self.initializer
        # An initializer repeats its values: each expert has a seed of its own.
        config = {**self.initializer.get_config(), "seed": seed + index}
        return type(self.initializer).from_config(config)

    def get_config(self):
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "shared": self.shared,
        }
