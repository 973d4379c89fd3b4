"""Compiled forward and backward passes of a layer, on any backend."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tools.benchmark.execution import first_output


def forward_backward(
    layer: keras.layers.Layer, inputs: np.ndarray, cotangent: np.ndarray
) -> Callable[[], Any]:
    """A function that returns a layer's outputs and all gradients.

    The outputs are returned too: without them a compiler may drop the last matmul,
    of which the gradients do not need the value.

    Args:
        layer: a built layer; of a tuple of outputs the first is taken.
        inputs: the layer's input.
        cotangent: the gradient of the total loss in the output. The layer's own
            losses are added.
    """
    backend = keras.backend.backend()
    return {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[backend](
        layer, inputs, cotangent
    )


def _jax(layer, inputs, cotangent):
    import jax

    cotangent = jax.numpy.asarray(cotangent)

    def loss(trainable, state, x):
        outputs, state, losses = layer.stateless_call(
            trainable, state, x, training=True, return_losses=True
        )
        outputs = first_output(outputs)
        return (outputs * cotangent).sum() + sum(losses), (outputs, state)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    trainable = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]
    x = jax.numpy.asarray(inputs)
    return lambda: step(trainable, state, x)


def _tensorflow(layer, inputs, cotangent):
    import tensorflow as tf

    variables = [v.value for v in layer.trainable_variables]

    @tf.function(jit_compile=True)
    def step(x, cotangent):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = first_output(layer(x, training=True))
            loss = tf.reduce_sum(outputs * cotangent) + sum(layer.losses)
        return outputs, tape.gradient(loss, [x, *variables])

    x, cotangent = tf.constant(inputs), tf.constant(cotangent)
    return lambda: step(x, cotangent)


def _torch(layer, inputs, cotangent):
    import torch

    variables = [v.value for v in layer.trainable_variables]
    x = torch.tensor(inputs, requires_grad=True)
    cotangent = torch.tensor(cotangent)

    def step():
        outputs = first_output(layer(x, training=True))
        loss = (outputs * cotangent).sum() + sum(layer.losses)
        return outputs, torch.autograd.grad(loss, [x, *variables])

    return step
