"""Callbacks: step counting, periodic measurements, weight averages, best epoch."""

import contextlib
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
from keras import ops

from keras_moe import _compat
from keras_moe._checks import check_integer, check_one_of, import_extra, unfit
from keras_moe._processes import process_index

UNITS = ("epochs", "steps")
MODES = ("max", "min")


class Callback(keras.callbacks.Callback):
    """A callback whose model may be any."""

    # Keras sets these before it calls anything else.
    model: Any
    params: dict


class Progress:
    """Step and epoch of a run, shared by its callbacks, which report batches to it."""

    def __init__(self):
        self.step = self.epoch = self._before_epoch = 0

    def begin_epoch(self, epoch: int) -> None:
        """Called when an epoch begins; its first batch is number 0."""
        self.epoch = epoch
        self._before_epoch = self.step

    def begin_step(self, batch: int) -> None:
        """Called when a batch begins."""
        self.step = self.step_of(batch)

    def step_of(self, batch: int) -> int:
        """Returns the number of steps after a batch of this epoch."""
        return self._before_epoch + batch + 1

    def hand_to(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Makes a run's callbacks share this count."""
        for callback in callbacks:
            if isinstance(callback, ProgressCallback):
                callback.progress = self


class ProgressCallback(Callback):
    """Base class of callbacks that count steps; overrides call `super()` first."""

    def __init__(self):
        super().__init__()
        self.progress = Progress()

    def on_epoch_begin(self, epoch, logs=None):
        self.progress.begin_epoch(epoch)

    # Not at the end of a batch: such callbacks make JAX wait for every step.
    def on_train_batch_begin(self, batch, logs=None):
        self.progress.begin_step(batch)


class StopAfterBatches(ProgressCallback):
    """Ends `fit` after a given number of batches of the run."""

    def __init__(self, batches: int):
        super().__init__()
        self.batches = batches

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        # `fit` reads this once the batch is done.
        if self.progress.step >= self.batches:
            self.model.stop_training = True


class PeriodicCallback(ProgressCallback):
    """Measures every few epochs or steps, by `measure`, and adds to the logs."""

    def __init__(self, every: int = 1, unit: str = "epochs"):
        super().__init__()
        self.every = check_integer("every", every)
        self.unit = check_one_of("unit", unit, UNITS)
        self.records = []
        self._probed: Any = None
        self._probe: Any = None

    def measure(self) -> dict[str, float]:
        """Returns metrics of `self.model` in its current state."""
        raise NotImplementedError

    def probe(self, make: Callable[[], Any]) -> Any:
        """Returns `make()`, made and compiled once for each model."""
        if self._probed is not self.model:
            self._probed, self._probe = self.model, make()
        return self._probe

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        if self.unit == "steps":
            # The current batch is not counted yet.
            self._measure_if_due(self.progress.step - 1)

    def on_epoch_end(self, epoch, logs=None):
        step = self.progress.step
        if self.unit == "steps":
            self._measure_if_due(step)
        elif (epoch + 1) % self.every == 0:
            self._measure(step)
        # The last measurement of the epoch.
        last = self.records[-1] if self.records else {"epoch": 0}
        if logs is not None and last["epoch"] == epoch + 1:
            logs.update({k: v for k, v in last.items() if k not in ("epoch", "step")})

    def get_state(self) -> dict:
        """Returns the state to keep in a checkpoint, as JSON data."""
        return {"records": list(self.records)}

    def set_state(self, state: dict) -> None:
        """Restores the state from a checkpoint."""
        self.records = list(state["records"])

    def _measure_if_due(self, step):
        last = self.records[-1]["step"] if self.records else 0
        if step and step % self.every == 0 and step != last:
            self._measure(step)

    def _measure(self, step):
        with unchanged(self.model):
            metrics = self.measure()
        record = {"epoch": self.progress.epoch + 1, "step": step, **metrics}
        self.records.append(record)
        self.measured(record)

    def measured(self, record: dict[str, Any]) -> None:
        """Called with each new record, after the model is restored."""


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores seeds, running metrics and random states on exit."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    with _compat.kept_random_states(), _compat.restored(variables):
        yield


@contextlib.contextmanager
def written_if_possible(path: str | os.PathLike) -> Iterator[None]:
    """Turns an OSError into a warning, so that training continues."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{os.fspath(path)} could not be written: {error}; the run goes on",
            stacklevel=4,
        )


class EventFile:
    """Writes scalars for TensorBoard at once; `SummaryWriter` may lose its queue."""

    def __init__(self, folder: str | os.PathLike, first_step: int = 0):
        tensorboardx = import_tensorboardx()
        self._event = tensorboardx.proto.event_pb2.Event
        self._scalar = tensorboardx.summary.scalar
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Names have a resolution of a second, and an existing file would be replaced.
        suffix = f".{os.getpid()}.{time.time_ns() % 10**9}"
        self._writer = tensorboardx.event_file_writer.EventsWriter(
            str(folder / "events"), suffix
        )
        # The file is closed with whoever writes it.
        weakref.finalize(self, self._writer.close)
        log = tensorboardx.proto.event_pb2.SessionLog
        self._append(step=first_step, session_log=log(status=log.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Appends the scalars of a step, by tag."""
        for tag, value in scalars.items():
            self._append(step=step, summary=self._scalar(tag, value))
        self._writer.flush()

    def _append(self, **fields):
        self._writer.write_event(self._event(wall_time=time.time(), **fields))


def import_tensorboardx():
    return import_extra(
        "tensorboardX",
        "Expected the package tensorboardX, which writes TensorBoard's files",
        "tensorboard",
    )


class ScalarLog(ProgressCallback):
    """Writes loss, metrics and the learning rate of each epoch for TensorBoard.

    Args:
        folder: folder for the events (needs tensorboardX).

    Example:

    >>> import tempfile
    >>> from keras_moe import training
    >>> folder = tempfile.mkdtemp()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> log = training.ScalarLog(folder)
    >>> _ = model.fit(np.ones((2, 1)), np.ones(2), verbose=0, callbacks=[log])
    """

    def __init__(self, folder: str | os.PathLike):
        super().__init__()
        import_tensorboardx()
        self.folder = folder
        self._events = None

    def on_epoch_end(self, epoch, logs=None):
        if process_index():
            return
        rate = ops.convert_to_numpy(self.model.optimizer.learning_rate)
        scalars = {**(logs or {}), "learning_rate": rate}
        step, events = self.progress.step, self._events
        self._events = None
        with written_if_possible(self.folder):
            # After a failure or another start, a new file hides the last one's rest.
            events = events or EventFile(self.folder, step)
            events.write(step, {name: float(x) for name, x in scalars.items()})
            self._events = events


class EvaluateAverages(Callback):
    """`SwapEMAWeights` that takes weights of several processes, and never rounds."""

    def on_train_begin(self, logs=None):
        if not _keeper(self.model).use_ema:
            raise ValueError("Expected an optimizer with use_ema=True; received: False")

    def on_test_begin(self, logs=None):
        _exchange(self.model)

    def on_test_end(self, logs=None):
        _exchange(self.model)


@contextlib.contextmanager
def averages_in_place(model: keras.Model) -> Iterator[None]:
    """Uses the averages as weights of a model in training within the context."""
    optimizer = _keeper(model)
    if optimizer is None or not (optimizer.use_ema and optimizer.built):
        yield
        return
    _exchange(model)
    try:
        yield
    finally:
        _exchange(model)


def _keeper(model) -> Any:
    optimizer = getattr(model, "optimizer", None)
    # `LossScaleOptimizer` wraps the optimizer.
    return getattr(optimizer, "inner_optimizer", optimizer)


def _exchange(model):
    optimizer = _keeper(model)
    for weight, average in zip(
        _compat.own_variables(optimizer, trainable=True),
        _compat.moving_averages(optimizer),
        strict=True,
    ):
        # Copied: on some backends the value changes with its variable.
        value = ops.copy(weight.value)
        weight.assign(average.value)
        average.assign(value)


class BestEpoch(Callback):
    """Finds the best epoch and stops a run that no longer improves.

    Unlike `keras.callbacks.EarlyStopping` its state is saved by `RunCheckpoint`: a
    resumed run stops after the same epoch as an uninterrupted one.

    Args:
        monitor: name of a metric in the history, such as `"few_shot/10_shot"`. Epochs
            without it are ignored.
        mode: `"max"` or `"min"`; None is `"min"` for names that end in "loss".
        patience: epochs without improvement after which the run stops, or None.

    Attributes:
        value: metric of the best epoch, None before the first.
        row: index of the best epoch in the history's lists.
        improved: whether the epoch that just ended is the best so far.

    Example:

    >>> from keras_moe.training import BestEpoch
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.0), "mse")
    >>> x, best = np.ones((4, 1)), BestEpoch("loss", patience=2)
    >>> history = model.fit(x, x, epochs=9, verbose=0, callbacks=[best]).history
    >>> len(history["loss"]), best.row
    (3, 0)
    """

    def __init__(
        self, monitor: str, mode: str | None = None, patience: int | None = None
    ):
        super().__init__()
        check_one_of("mode", mode, (None, *MODES))
        check_integer("patience", patience, optional=True)
        self.monitor = monitor
        self.mode = mode or ("min" if monitor.endswith("loss") else "max")
        self.patience = patience
        self.value, self.row = None, None
        self.improved = False
        # Past epochs, also of a run that began without this callback.
        self.epochs = 0
        self.wait = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.improved = False

    def on_epoch_end(self, epoch, logs=None):
        row, self.epochs = self.epochs, self.epochs + 1
        value = (logs or {}).get(self.monitor)
        if value is None:
            if "/" not in self.monitor:
                expected = f"monitor to be one of {sorted(logs or {})}"
                raise unfit(expected, monitor=self.monitor)
            return
        value = float(value)
        if self._is_better(value):
            self.value, self.row, self.improved = value, row, True
            self.wait = 0
            return
        self.wait += 1
        if self.patience is not None and self.wait >= self.patience:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        if self.value is not None or not self.epochs:
            return
        warnings.warn(
            "No epoch is the best, since none has a number for "
            f"monitor={self.monitor!r}; the last metrics were {sorted(logs or {})}",
            stacklevel=2,
        )

    def _is_better(self, value):
        if self.value is None or math.isnan(value):
            return not math.isnan(value)
        return value > self.value if self.mode == "max" else value < self.value

    def get_state(self) -> dict:
        """Returns the state to keep in a checkpoint, as JSON data."""
        names = ("value", "row", "epochs", "wait")
        return {name: getattr(self, name) for name in names}

    def set_state(self, state: dict) -> None:
        """Restores the state from a checkpoint."""
        vars(self).update(state)
