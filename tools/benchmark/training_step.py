"""One hand-written training step of a model, as a function to time."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def hand_written_step(
    model: keras.Model,
    images: np.ndarray,
    labels: np.ndarray,
    optimizer: Any = None,
) -> Callable[[], Any]:
    """A step on any backend: forward, loss, gradients and an optimizer.

    It is compiled as one but on PyTorch, as Keras's own is. Each call continues from
    the last. The model's own losses are added.

    Args:
        model: a built model that returns logits.
        images: one batch of inputs.
        labels: integers (B,).
        optimizer: a Keras optimizer that is not built; None for Adam.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return jitted_step(model, images, labels, optimizer)
    step = {"tensorflow": _tensorflow, "torch": _torch}[backend]
    return step(model, images, labels, optimizer)


def jitted_step(
    model: keras.Model,
    images: np.ndarray,
    labels: np.ndarray,
    optimizer: Any = None,
) -> Callable[[], Any]:
    """`hand_written_step` on JAX."""
    import jax

    optimizer = optimizer or keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)

    def loss_fn(trainable, state, images, labels):
        logits, state, losses = model.stateless_call(
            trainable, state, images, training=True, return_losses=True
        )
        return _loss(labels, logits, losses), state

    def step(trainable, state, optimizer_state, images, labels):
        (loss, state), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable, state, images, labels
        )
        trainable, optimizer_state = optimizer.stateless_apply(
            optimizer_state, gradients, trainable
        )
        return loss, trainable, state, optimizer_state

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    held = [
        [jax.numpy.array(v.value) for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]

    # Once, and not in every step.
    batch = [*map(jax.numpy.asarray, (images, labels))]

    def run():
        loss, *held[:] = compiled(*held, *batch)
        return loss

    return run


def _tensorflow(model, images, labels, optimizer):
    import tensorflow as tf

    optimizer = optimizer or keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]

    @tf.function(jit_compile=True)
    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = _loss(labels, logits, model.losses)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    images, labels = tf.constant(images), tf.constant(labels)
    return lambda: step(images, labels)


def _torch(model, images, labels, optimizer):
    import torch

    optimizer = optimizer or keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]
    # On the model's device.
    images, labels = map(keras.ops.convert_to_tensor, (images, labels))

    def step():
        loss = _loss(labels, model(images, training=True), model.losses)
        gradients = torch.autograd.grad(loss, variables)
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        return loss.detach()

    return step


def _loss(labels, logits, losses):
    """The mean cross-entropy, with a model's own losses."""
    each = keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
    )
    return keras.ops.mean(each) + sum(losses)
