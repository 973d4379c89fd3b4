"""Gradients of a layer's or model's weights in training mode, on every backend."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree


def training_gradients(
    layer: keras.layers.Layer,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    training: bool = True,
    **kwargs: Any,
) -> list[np.ndarray]:
    """The gradients of a loss, with the layer's own losses added.

    Args:
        layer: a built layer or model.
        inputs: its input, or a dict of inputs.
        loss: function from outputs to a scalar; None weighs every float output at
            random.
        training: passed to the layer.
        **kwargs: passed to the layer.

    Returns:
        One array for each trainable weight.
    """
    if loss is None:
        loss = _random_loss
    if "training" in inspect.signature(layer.call).parameters:
        kwargs["training"] = training
    return _BACKENDS[keras.backend.backend()](layer, inputs, loss, kwargs)


def _random_loss(outputs):
    generator = np.random.default_rng(0)
    total = 0.0
    for value in tree.flatten(outputs):
        if "int" not in keras.backend.standardize_dtype(value.dtype):
            weights = generator.normal(size=tuple(value.shape)).astype("float32")
            value = keras.ops.cast(value, "float32")
            total = total + keras.ops.sum(keras.ops.multiply(value, weights))
    return total


def _jax(layer, inputs, loss, kwargs):
    import jax

    def total(trainable, state, x):
        outputs, _, losses = layer.stateless_call(
            trainable, state, x, return_losses=True, **kwargs
        )
        return loss(outputs) + sum(losses)

    gradients = jax.jit(jax.grad(total))(
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
        inputs,
    )
    return [np.asarray(gradient) for gradient in gradients]


def _tensorflow(layer, inputs, loss, kwargs):
    import tensorflow as tf

    weights = [v.value for v in layer.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = layer(tree.map_structure(tf.convert_to_tensor, inputs), **kwargs)
        total = loss(outputs) + sum(layer.losses)
    gradients = tape.gradient(
        total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def _torch(layer, inputs, loss, kwargs):
    import torch

    weights = [v.value for v in layer.trainable_variables]
    inputs = tree.map_structure(keras.ops.convert_to_tensor, inputs)
    outputs = layer(inputs, **kwargs)
    total = loss(outputs) + sum(layer.losses)
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    return [
        np.zeros(tuple(weight.shape), "float32")
        if gradient is None
        else gradient.float().numpy()
        for weight, gradient in zip(weights, gradients)
    ]


_BACKENDS = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
