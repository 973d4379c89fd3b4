"""Weights that lie on several devices or processes, as whole arrays."""

from typing import Any

import keras
import numpy as np


def gathered(variable: Any) -> np.ndarray:
    """The whole value of a variable, on every process.

    Keras saves and reads values that one process can see. If a distribution spans
    several, all of them must call this, for the same variables in the same order; one
    may then save the value. Each variable is whole on every device meanwhile.

    Args:
        variable: `keras.Variable` on any devices.

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
