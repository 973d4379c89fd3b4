"""Times of several functions interleaved in one run, on any backend.

Time on a shared machine drifts, so each round runs every candidate once, in a
shuffled order, and figures are ratios of medians.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def interleaved(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Times functions in turn.

    Args:
        candidates: functions by name, whose results may still be being computed.
        rounds: number of times that each is run, after two that compile and warm up.
        seed: seed of their order.
        on_round: function to call after each round.

    Returns:
        The median seconds of each candidate.

    Example:

    >>> from keras_moe.timing import interleaved
    >>> functions = {"short": lambda: sum(range(9)), "long": lambda: sum(range(99_999))}
    >>> seconds = interleaved(functions, rounds=3)
    >>> seconds["short"] < seconds["long"]
    True
    """
    for function in candidates.values():
        for _ in range(2):
            wait(function())
    seconds = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            wait(candidates[name]())
            seconds[name].append(time.perf_counter() - start)
        on_round()
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait(result: Any) -> None:
    """Blocks until a result is computed.

    Args:
        result: tensors in any structure.
    """
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
    """A layer's forward pass as a function to time, compiled where backends compile.

    Args:
        layer: a built layer; of a tuple of outputs the first is taken.
        inputs: the layer's input.
        training: value of the argument `training`.

    Returns:
        A function that returns the outputs, without gradients.
    """
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
