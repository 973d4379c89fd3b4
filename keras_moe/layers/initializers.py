"""Initializers for tensors that stack or fold the matrices which they initialise."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_moe")
class PerExpert(keras.initializers.Initializer):
    """Initialises each expert's slice by itself, so that its fans are its own.

    An initializer that sees (E, D, H) takes E for a kernel's spatial size and makes
    the weights too small.

    Args:
        initializer: of one expert's slice.
        shared: give all experts the same values, as V-MoE does: they differ by the
            tokens that they see.

    Example:

    >>> from keras_moe.layers import PerExpert
    >>> PerExpert("glorot_uniform")((4, 8, 16)).shape == (4, 8, 16)
    True
    """

    def __init__(self, initializer: Any, shared: bool = False):
        self.initializer = keras.initializers.get(initializer)
        self.shared = shared

    def __call__(self, shape, dtype=None):
        num_experts, *shape = shape
        if self.shared:
            value = self.initializer(shape, dtype=dtype)
            return ops.tile(value[None], [num_experts] + [1] * len(shape))
        config = self.initializer.get_config()
        if "seed" not in config:
            return ops.stack([self.initializer(shape, dtype)] * num_experts)
        # An initializer repeats its values, so each expert gets one of its own,
        # with seeds that follow from the given one.
        seed = config["seed"]
        if isinstance(seed, dict) or seed is None:
            # A None is drawn from Keras's global seed; a SeedGenerator moves on.
            return ops.stack(
                [
                    self.initializer.__class__.from_config(dict(config))(shape, dtype)
                    for _ in range(num_experts)
                ]
            )
        return ops.stack(
            [
                self.initializer.__class__.from_config({**config, "seed": seed + i})(
                    shape, dtype
                )
                for i in range(num_experts)
            ]
        )

    def get_config(self):
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "shared": self.shared,
        }
