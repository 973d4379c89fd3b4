"""The largest of a row and their places, the same on every backend."""

from typing import Any

import keras
from keras import ops


def largest(values: Any, number: Any, stable: bool = True) -> tuple[Any, Any]:
    """The `number` largest along the last axis and their places, in falling order.

    Args:
        values: float (..., N).
        number: at most N.
        stable: whether equal values must come lowest place first; where that does not
            matter, PyTorch is spared a sort.

    Returns:
        The values, (..., number), and their places, int32.
    """
    backend = keras.backend.backend()
    # PyTorch's `topk` takes ties in any order. JAX writes `top_k` into an exported
    # model, which has dimensions that are no numbers, as an operation that the
    # TensorFlow beside it may be too old to read.
    exports = backend == "jax" and not all(isinstance(d, int) for d in values.shape)
    if exports or (backend == "torch" and stable):
        places = ops.argsort(-values, axis=-1)[..., :number]
        return ops.take_along_axis(values, places, axis=-1), ops.cast(places, "int32")
    best, places = ops.top_k(values, number)
    return best, ops.cast(places, "int32")
