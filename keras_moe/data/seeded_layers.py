"""Keras layers inside `tf.data` whose randomness comes from a seed tensor."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_moe.compat import (
    flatten_layers,
    has_seed_generator,
    replaced_seed_generator,
)

# The layers made here do not follow the policy and the data format of the models:
# bfloat16 has 8 bits, too few for fractions of a pixel value.
PLAIN = {"dtype": "float32", "data_format": "channels_last"}


def call_with_seed(layer: keras.layers.Layer, data: Any, seed: Any) -> Any:
    """Calls a Keras layer in training mode, its randomness taken from a seed tensor.

    A layer's own generator is a variable that every call advances: the result for an
    image would depend on the number of images before it, and parallel calls would race
    for the variable. A seed per element makes the result a function of its place.
    """
    options = {"training": True} if has_argument(layer.call, "training") else {}
    with _seeded(layer, seed) if seed is not None else contextlib.nullcontext():
        return layer(data, **options)


@contextlib.contextmanager
def _seeded(layer: keras.layers.Layer, seed: Any) -> Iterator[None]:
    generator = _ElementSeed(seed)
    with contextlib.ExitStack() as replaced:
        for part in flatten_layers(layer):
            if has_seed_generator(part):
                replaced.enter_context(replaced_seed_generator(part, generator))
        yield


class _ElementSeed(keras.random.SeedGenerator):
    """A generator without state: its seeds follow from a tensor and a count."""

    def __init__(self, seed: Any):
        # super().__init__ would make a variable.
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> Any:
        import tensorflow as tf

        self._count += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._count)


def takes_seeds(layer: keras.layers.Layer) -> bool:
    """Whether the layer and those inside are Keras's own for `tf.data`."""
    return all(
        has_seed_generator(part)
        or isinstance(part, (keras.layers.Pipeline, keras.Sequential))
        for part in flatten_layers(layer)
    )


def has_argument(function: Callable, name: str) -> bool:
    """Whether a function has an argument of a name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # The function is written in C.
        return False
