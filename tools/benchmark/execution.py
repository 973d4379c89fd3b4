"""A layer's forward pass as each backend runs it best, and the wait for its result."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def wait(result: Any) -> None:
    """Blocks until a result is computed."""
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready(result)
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def forward(
    layer: keras.layers.Layer, inputs: np.ndarray, training: bool
) -> Callable[[], Any]:
    """A layer's forward pass as a function, compiled where backends compile."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        @jax.jit
        def run(trainable, state, x):
            outputs, _ = layer.stateless_call(trainable, state, x, training=training)
            return first_output(outputs)

        trainable = [v.value for v in layer.trainable_variables]
        state = [v.value for v in layer.non_trainable_variables]
        x = jax.numpy.asarray(inputs)
        return lambda: run(trainable, state, x)
    if backend == "tensorflow":
        import tensorflow as tf

        run = tf.function(
            lambda x: first_output(layer(x, training=training)), jit_compile=True
        )
        x = tf.constant(inputs)
        return lambda: run(x)
    import torch

    x = torch.tensor(inputs)

    def run_eagerly():
        with torch.no_grad():
            return first_output(layer(x, training=training))

    return run_eagerly


def first_output(outputs: Any) -> Any:
    """The first of a tuple of outputs, or the only output."""
    return outputs[0] if isinstance(outputs, tuple) else outputs
