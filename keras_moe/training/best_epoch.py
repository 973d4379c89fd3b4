"""The best epoch of a run by one of its metrics: to keep it, and to stop after it."""

import math
import warnings
from typing import Any

import keras

from keras_moe.checks import check_integer, check_one_of

MODES = ("max", "min")
BEST = ("keep", "restore")


class BestEpoch(keras.callbacks.Callback):
    """Finds the best epoch, and ends a run that does not improve any more.

    Unlike `keras.callbacks.EarlyStopping` it has a state for `RunCheckpoint`: a run
    that was killed stops after the same epoch as one that was not.

    Args:
        monitor: name of a metric as the history has it, such as `"val_accuracy"` or
            `"few_shot/10_shot"`. One with a slash need not be measured each epoch;
            only epochs in which it is count. There is a warning at the end if it
            never was, or was always NaN.
        mode: `"max"` or `"min"`, what is better; None is `"min"` for names that end
            with "loss", and `"max"` for others.
        patience: epochs without a better one after which the run ends; None for never.

    Attributes:
        value: the metric of the best epoch, None before the first.
        row: index of the best epoch in the lists of the history.
        improved: whether the epoch that has just ended is the best.

    Raises:
        ValueError: if an argument is out of range; in training, if there is no such
            metric.

    Example:

    >>> import keras
    >>> import numpy as np
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
        check_monitor(monitor, mode, patience, "mode")
        self.monitor = monitor
        self.mode = mode or ("min" if monitor.endswith("loss") else "max")
        self.patience = patience
        self.value, self.row = None, None
        self.improved = False
        self._epochs = 0
        self._wait = 0
        self._known = []

    def count_from(self, rows: int) -> None:
        """Counts the epochs of a run that began without this callback.

        Args:
            rows: number of epochs in its history.
        """
        self._epochs = rows

    def on_epoch_begin(self, epoch, logs=None):
        self.improved = False

    def on_epoch_end(self, epoch, logs=None):
        row, self._epochs = self._epochs, self._epochs + 1
        self._known = sorted({*self._known, *(logs or {})})
        value = (logs or {}).get(self.monitor)
        if value is None:
            if "/" not in self.monitor:
                raise ValueError(
                    f"Expected monitor to be one of {sorted(logs or {})}; "
                    f"received: monitor={self.monitor!r}"
                )
            return
        value = float(value)
        if self._is_better(value):
            self.value, self.row, self.improved = value, row, True
            self._wait = 0
            return
        self._wait += 1
        if self.patience is not None and self._wait >= self.patience:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        if self.value is not None or not self._epochs:
            return
        reason = "was always NaN" if self._wait else "never came"
        warnings.warn(
            f"No epoch is the best: monitor={self.monitor!r} {reason}; the metrics "
            f"were {self._known}",
            stacklevel=2,
        )

    def _is_better(self, value):
        if self.value is None or math.isnan(value):
            return not math.isnan(value)
        return value > self.value if self.mode == "max" else value < self.value

    def get_state(self) -> dict:
        """Returns the state that a checkpoint of the run keeps, JSON."""
        return {
            "value": self.value,
            "row": self.row,
            "epochs": self._epochs,
            "wait": self._wait,
        }

    def set_state(self, state: dict) -> None:
        """Goes on from the state of a checkpoint."""
        self.value, self.row = state["value"], state["row"]
        self._epochs, self._wait = state["epochs"], state["wait"]


def check_monitor(
    monitor: Any, mode: Any, patience: Any, mode_name: str = "monitor_mode"
) -> None:
    """Raises ValueError if an argument of `BestEpoch` is out of range."""
    if not isinstance(monitor, str) or not monitor:
        raise ValueError(
            f"Expected the name of a metric; received: monitor={monitor!r}"
        )
    if mode is not None:
        check_one_of(mode_name, mode, MODES)
    if patience is not None:
        check_integer("patience", patience)


def check_best(monitor: Any, mode: Any, patience: Any, best: Any) -> None:
    """Raises ValueError if settings of a recipe about the best epoch do not fit."""
    if best is not None:
        check_one_of("best", best, BEST)
    check_monitor("loss" if monitor is None else monitor, mode, patience)
    if patience is best is None and (monitor, mode) != (None, None):
        raise ValueError(
            "Expected patience or best with monitor and monitor_mode; received: "
            f"monitor={monitor!r}, monitor_mode={mode!r}, patience=None, best=None"
        )
