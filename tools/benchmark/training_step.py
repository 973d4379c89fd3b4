"""One compiled training step of a model on JAX, as a function to time."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def jitted_step(
    model: keras.Model, images: np.ndarray, labels: np.ndarray
) -> Callable[[], Any]:
    """A hand-written step: forward, loss, gradients and Adam, compiled as one.

    Each call continues from the last. The model's own losses are added.
    """
    import jax

    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)

    def loss_fn(trainable, state, images, labels):
        logits, state, losses = model.stateless_call(
            trainable, state, images, training=True, return_losses=True
        )
        loss = keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )
        return loss + sum(losses), state

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

    def run():
        loss, *held[:] = compiled(*held, images, labels)
        return loss

    return run
