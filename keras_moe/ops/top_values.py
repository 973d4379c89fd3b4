"""The top values of a row and their places, the same on every backend."""

from typing import Any

import keras
from keras import ops


def top_values(values: Any, number: Any, stable: bool = True) -> tuple[Any, Any]:
    """The largest values along the last axis and their places, in falling order.

    Args:
        values: float (..., N).
        number: number of values, at most N.
        stable: whether equal values must come lowest place first; where that does not
            matter, PyTorch is spared a sort.

    Returns:
        The values, (..., number), and their places, int32.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.top_values import top_values
    >>> values, places = top_values(np.array([1.0, 3.0, 3.0], "float32"), 2)
    >>> np.array(values).tolist(), np.array(places).tolist()
    ([3.0, 3.0], [1, 2])
    """
    backend = keras.backend.backend()
    # PyTorch's `topk` takes ties in any order. In an exported JAX model, where some
    # dimensions are no numbers, `top_k` is an operation that the installed TensorFlow
    # may be too old to read.
    exports = backend == "jax" and not all(isinstance(d, int) for d in values.shape)
    if exports or (backend == "torch" and stable):
        places = ops.argsort(-values, axis=-1)[..., :number]
        return ops.take_along_axis(values, places, axis=-1), ops.cast(places, "int32")
    best, places = ops.top_k(values, number)
    return best, ops.cast(places, "int32")
