"""Gradients of a layer's or model's weights in training mode, on every backend."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree

from tests.gradients import gradient


def training_gradients(
    layer: keras.layers.Layer,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    training: bool = True,
    **kwargs: Any,
) -> list[np.ndarray]:
    """The gradients of a loss (None: a random one) and the layer's own, by weight."""
    if "training" in inspect.signature(layer.call).parameters:
        kwargs["training"] = training
    inputs = tree.map_structure(keras.ops.convert_to_tensor, inputs)
    state = [variable.value for variable in layer.non_trainable_variables]

    def total(*trainable):
        outputs, _, losses = layer.stateless_call(
            trainable, state, inputs, return_losses=True, **kwargs
        )
        return (loss or _random_loss)(outputs) + sum(losses)

    return gradient(total, *map(keras.ops.convert_to_numpy, layer.trainable_variables))


def _random_loss(outputs):
    generator = np.random.default_rng(0)
    total = 0.0
    for value in tree.flatten(outputs):
        if "int" not in keras.backend.standardize_dtype(value.dtype):
            weights = generator.normal(size=tuple(value.shape)).astype("float32")
            value = keras.ops.cast(value, "float32")
            total = total + keras.ops.sum(keras.ops.multiply(value, weights))
    return total
