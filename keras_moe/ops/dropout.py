"""Dropout."""

from typing import Any

import keras
from keras import ops


def dropout(x: Any, rate: float, seed: keras.random.SeedGenerator) -> Any:
    """Zeros in the place of some values, and the others over the rest of their share.

    Args:
        x: float tensor of any shape.
        rate: share of the values that become zeros, in [0, 1).
        seed: generator of the draws, which moves on.

    Returns:
        A tensor of the shape and dtype of `x`, equal to that of
        `keras.random.dropout`, which takes ten times as long on CPUs with JAX.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe.ops.dropout import dropout
    >>> x = dropout(np.ones(8, "float32"), 0.5, keras.random.SeedGenerator(0))
    >>> set(np.array(x).tolist()) <= {0.0, 2.0}
    True
    """
    if keras.backend.backend() == "jax" and rate > 0:
        from keras_moe.ops.kernels import dropout_jax

        x = ops.convert_to_tensor(x)
        if dropout_jax.is_valid(x):
            return dropout_jax.dropout(x, rate, seed.next())
    return dropout_reference(x, rate, seed)


def dropout_reference(x: Any, rate: float, seed: keras.random.SeedGenerator) -> Any:
    """`dropout` as Keras computes it.

    Args:
        x: float tensor of any shape.
        rate: share of the values that become zeros, in [0, 1).
        seed: generator of the draws, which moves on.

    Returns:
        A tensor of the shape and dtype of `x`.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe.ops.dropout import dropout_reference
    >>> x = np.ones(8, "float32")
    >>> x = dropout_reference(x, 0.5, keras.random.SeedGenerator(0))
    >>> set(np.array(x).tolist()) <= {0.0, 2.0}
    True
    """
    return keras.random.dropout(ops.convert_to_tensor(x), rate, seed=seed)
