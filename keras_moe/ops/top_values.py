"""The top values of a row and their places, the same on every backend."""

from typing import Any

import keras
from keras import ops


def top_values(values: Any, number: Any, stable: bool = True) -> tuple[Any, Any]:
    """The largest values along the last axis and their places, in falling order."""
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
