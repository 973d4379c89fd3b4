"""Reads weights of models in memory, by their paths."""

import keras
import numpy as np

from keras_moe.models.conversion.published_tensors import PublishedTensors, TensorInfo


class KerasHubModel(PublishedTensors):
    """The weights of a model in memory, or of some layers of it.

    Args:
        model: a Keras model.
        layers: layers whose weights are read; None takes all.

    Raises:
        ValueError: if two weights have one path.
    """

    def __init__(self, model: keras.Model, layers: list | None = None):
        label = f"{type(model).__name__} {model.name!r}"
        self._weights = {}
        tensors = {}
        for weight in (w for layer in layers or [model] for w in layer.weights):
            if "seed_generator" in weight.path:
                continue
            if weight.path in tensors:
                raise ValueError(
                    f"Expected a path for each weight of {label}; received: "
                    f"{weight.path!r} twice"
                )
            self._weights[weight.path] = weight
            dtype = keras.backend.standardize_dtype(weight.dtype)
            tensors[weight.path] = TensorInfo(tuple(weight.shape), dtype, label)
        super().__init__(label, tensors)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        array = self._weights[name].value
        if self[name].dtype == "bfloat16":
            array = keras.ops.cast(array, "float32")
        # A copy: on some backends the array is the weight's own memory.
        array = np.array(keras.ops.convert_to_numpy(array))
        return array if rows is None else array[rows]
