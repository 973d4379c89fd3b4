"""Reads weights of models in memory, by their paths."""

import keras
import numpy as np

from keras_moe.models.conversion.published_tensors import PublishedTensors, TensorInfo


class KerasHubModel(PublishedTensors):
    """The weights of a model in memory, or of some layers of it."""

    def __init__(self, model: keras.Model, layers: dict[str, list] | None = None):
        label = f"{type(model).__name__} {model.name!r}"
        self._weights = {}
        tensors = {}
        for weight, start in (
            (weight, start)
            for start, parts in (layers or {"": [model]}).items()
            for layer in parts
            for weight in layer.weights
        ):
            name = start + weight.path
            if "seed_generator" in name:
                continue
            if name in tensors:
                raise ValueError(
                    f"Expected a path for each weight of {label}; received: "
                    f"{name!r} twice"
                )
            self._weights[name] = weight
            dtype = keras.backend.standardize_dtype(weight.dtype)
            tensors[name] = TensorInfo(tuple(weight.shape), dtype, label)
        super().__init__(label, tensors)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        array = self._weights[name].value
        if self[name].dtype == "bfloat16":
            array = keras.ops.cast(array, "float32")
        # A copy: on some backends the array is the weight's own memory.
        array = np.array(keras.ops.convert_to_numpy(array))
        return array if rows is None else array[rows]
