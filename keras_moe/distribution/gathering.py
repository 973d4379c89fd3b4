"""Weights that lie on several devices or processes, as whole arrays."""

from typing import Any

import keras
import numpy as np


def gathered(variable: Any) -> np.ndarray:
    """The whole value of a variable, on every process.

    Keras saves and reads values that one process can see. Where a distribution spans
    several, all of them must call this, for the same variables in the same order; one
    may then save what it got. It is for one variable at a time: it is whole on each
    device meanwhile.

    Args:
        variable: a `keras.Variable`.

    Returns:
        A NumPy array.

    Example:

    >>> import keras
    >>> from keras_moe import distribution
    >>> distribution.gathered(keras.Variable([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    value = variable.value
    distribution = keras.distribution.distribution()
    if distribution is not None:
        everywhere = keras.distribution.TensorLayout(
            [None] * len(variable.shape), distribution.device_mesh
        )
        value = keras.distribution.distribute_tensor(value, everywhere)
    return keras.ops.convert_to_numpy(value)
