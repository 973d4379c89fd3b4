"""Measurements at regular intervals while a model trains, which leave it unchanged."""

import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_moe.checks import check_integer, check_one_of
from keras_moe.training.progress import ProgressCallback
from keras_moe.variables import restored

UNITS = ("epochs", "steps")


class PeriodicCallback(ProgressCallback):
    """Measures every so many epochs or steps; subclasses say what, in `measure`.

    Figures come into the logs at the end of the epoch: the progress line, the history
    and callbacks after this one have them. Training is the same, bit for bit, with it
    and without.
    """

    def __init__(self, every: int = 1, unit: str = "epochs"):
        super().__init__()
        self.every = check_integer("every", every)
        self.unit = check_one_of("unit", unit, UNITS)
        self.records = []
        # The step of the newest record.
        self._measured = 0

    def measure(self) -> dict[str, float]:
        """The figures of `self.model` as it is."""
        raise NotImplementedError

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        if self.unit == "steps":
            # This batch's own step is not yet made.
            self._measure_if_due(self.progress.step - 1)

    def on_epoch_end(self, epoch, logs=None):
        step = self.progress.step
        if self.unit == "steps":
            self._measure_if_due(step)
        elif (epoch + 1) % self.every == 0:
            self._measure(step)
        # The last of several in an epoch.
        last = self.records[-1] if self.records else {"epoch": 0}
        if logs is not None and last["epoch"] == epoch + 1:
            logs.update({k: v for k, v in last.items() if k not in ("epoch", "step")})

    def get_state(self) -> dict:
        """Returns the state that a checkpoint of the run keeps, JSON."""
        return {
            "measured": self._measured,
            "records": list(self.records),
        }

    def set_state(self, state: dict) -> None:
        """Goes on from the state of a checkpoint."""
        self._measured = state["measured"]
        self.records = list(state["records"])

    def _measure_if_due(self, step):
        if step and step % self.every == 0 and step != self._measured:
            self._measure(step)

    def _measure(self, step):
        with unchanged(self.model):
            figures = self.measure()
        self._measured = step
        record = {"epoch": self.progress.epoch + 1, "step": step, **figures}
        self.records.append(record)
        self.measured(record)

    def measured(self, record: dict[str, Any]) -> None:
        """Called with each new record, once the model is as it was."""


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Seeds, running metrics and random states come back after the context.

    Within it, the variables of a model that `fit` trains on JAX have their values.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    states = random.getstate(), np.random.get_state()
    try:
        with restored(variables):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def written_if_possible(path: str | os.PathLike) -> Iterator[None]:
    """Makes a warning of an OSError in the context, since a run is worth more."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{os.fspath(path)} could not be written: {error}; the run goes on",
            stacklevel=4,
        )
