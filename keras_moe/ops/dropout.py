"""Dropout."""

from typing import Any

import keras
from keras import ops


def dropout(x: Any, rate: float, seed: keras.random.SeedGenerator) -> Any:
    """Zeros in the place of some values, and the others over the rest of their
    share.
    """
    if keras.backend.backend() == "jax" and rate > 0:
        from keras_moe.ops.kernels import dropout_jax

        x = ops.convert_to_tensor(x)
        if dropout_jax.is_valid(x):
            return dropout_jax.dropout(x, rate, seed.next())
    return dropout_reference(x, rate, seed)


def dropout_reference(x: Any, rate: float, seed: keras.random.SeedGenerator) -> Any:
    """`dropout` as Keras computes it."""
    return keras.random.dropout(ops.convert_to_tensor(x), rate, seed=seed)
