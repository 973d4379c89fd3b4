"""Evaluation with the averages that an optimizer keeps of the weights."""

import contextlib
from collections.abc import Iterator

import keras
from keras import ops

from keras_moe.compat import moving_averages, own_variables


class EvaluateAverages(keras.callbacks.Callback):
    """Puts the averages in the weights' place for each evaluation within `fit`.

    `keras.callbacks.SwapEMAWeights` goes by way of NumPy, which cannot be where weights
    lie on several processes, and on TensorFlow by adding and subtracting, which rounds
    them.

    Raises:
        ValueError: if the optimizer keeps no averages, `use_ema=True`.

    Example:

    >>> import keras
    >>> from keras_moe.training import EvaluateAverages
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    >>> x = keras.ops.ones((4, 1))
    >>> history = model.fit(
    ...     x, x, validation_data=(x, x), callbacks=[EvaluateAverages()], verbose=0
    ... )
    """

    def on_train_begin(self, logs=None):
        if not _keeper(self.model).use_ema:
            raise ValueError("Expected an optimizer with use_ema=True; received: False")

    def on_test_begin(self, logs=None):
        _exchange(self.model)

    def on_test_end(self, logs=None):
        _exchange(self.model)


@contextlib.contextmanager
def averages_in_place(model: keras.Model) -> Iterator[None]:
    """Within the context the weights of a model in training are their averages."""
    optimizer = _keeper(model)
    if optimizer is None or not (optimizer.use_ema and optimizer.built):
        yield
        return
    _exchange(model)
    try:
        yield
    finally:
        _exchange(model)


def _keeper(model):
    optimizer = getattr(model, "optimizer", None)
    # One that scales losses has another within.
    return getattr(optimizer, "inner_optimizer", optimizer)


def _exchange(model):
    optimizer = _keeper(model)
    for weight, average in zip(
        own_variables(optimizer, trainable=True),
        moving_averages(optimizer),
        strict=True,
    ):
        # A copy: on some backends a variable's value changes with it.
        value = ops.copy(weight.value)
        weight.assign(average.value)
        average.assign(value)
