"""The callback that saves a run at regular intervals and resumes it."""

import dataclasses
import importlib
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_moe._checks import check_integer
from keras_moe._compat import random_states, set_backend_states, set_random_states
from keras_moe._version import __version__
from keras_moe.training import checkpoints
from keras_moe.training.callbacks import BestEpoch, Callback, Progress


class RunCheckpoint(Callback):
    """Saves a run after each epoch, or every few steps, and resumes it.

    A checkpoint also holds random states, running metrics, the history, and the state
    of callbacks with `get_state` (which returns JSON data) and `set_state`. A run that
    resumes from it, with batches from `step` on, continues bit for bit if the backend
    is deterministic.

    A failed write only warns, except for the last checkpoint of the run. Non-finite
    weights are never saved.

    Args:
        folder: folder for the run's checkpoints only; may be remote, such as
            `"gs://bucket/run"`.
        steps_per_epoch: number of steps in an epoch.
        every: steps between checkpoints; None saves after each epoch. The end of the
            run is always saved.
        keep: see `save_checkpoint`, also for `keep_every`.
        settings: JSON data such as a recipe's `settings()`. Checkpoints with other
            settings are rejected.
        restart: whether to delete existing checkpoints and start over.
        branch_from: folder of another run's checkpoint, such as
            `"runs/long/checkpoints/step-00650000"`. If `folder` has no checkpoint yet,
            the run resumes from there, whatever its settings, with a new history.
        best: callback in `around` that compares epochs; the best epoch's checkpoint is
            kept for `restore_best`.
        may_differ: settings that may differ from the checkpoint's, see `changed`.
        endless: whether `fit` gets `steps_per_epoch`, so that one iterator gives the
            batches of all epochs.

    Example:

    >>> import tempfile
    >>> from keras_moe.training import RunCheckpoint
    >>> def run(folder, epochs):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     checkpoint = RunCheckpoint(folder, steps_per_epoch=2)
    ...     step = checkpoint.restore(model)
    ...     model.fit(
    ...         np.ones((4, 2)),
    ...         np.ones((4, 1)),
    ...         batch_size=2,
    ...         epochs=epochs,
    ...         initial_epoch=step // 2,
    ...         callbacks=checkpoint.around([]),
    ...         verbose=0,
    ...     )
    ...     return step, len(checkpoint.history["loss"])
    >>> folder = tempfile.mkdtemp()
    >>> run(folder, epochs=1), run(folder, epochs=3)
    ((0, 1), (2, 3))
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        steps_per_epoch: int,
        *,
        every: int | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        settings: dict | None = None,
        restart: bool = False,
        branch_from: str | os.PathLike | None = None,
        best: BestEpoch | None = None,
        may_differ: Collection[str] = (),
        endless: bool = False,
    ):
        super().__init__()
        self.folder = folder
        self.steps_per_epoch = check_integer("steps_per_epoch", steps_per_epoch)
        self.every = check_integer("every", every, optional=True)
        self.keep = check_integer("keep", keep)
        self.keep_every = check_integer("keep_every", keep_every, optional=True)
        # As JSON in checkpoints gives them back.
        self.settings = json.loads(json.dumps(dict(settings or {})))
        self.restart = restart
        self.branch_from = branch_from
        # One step count for all callbacks of the run.
        self.progress = Progress()
        self.finished, self.history, self.last = False, {}, None
        self.best = best
        # Step of the best epoch's checkpoint, and its row in the history.
        self.best_step, self.best_row = None, None
        self.may_differ, self.endless = may_differ, endless
        # Old values of the settings that changed.
        self.changed = {}
        self._restored, self._begins_metrics = None, False
        # Random states for the first batch.
        self._random = None
        self._callbacks = []

    def restore(self, model: keras.Model) -> int:
        """Restores a model from the newest intact checkpoint; returns its step or 0.

        Random states are restored once more when `fit` begins, and within an epoch
        running metrics, too. On TensorFlow these do not exist before the first batch:
        call `model.evaluate(..., steps=1)` first.

        Args:
            model: a model compiled like the run's.
        """
        checkpoints.clean_folder(self.folder, everything=self.restart)
        # Not searched: other processes may still be deleting checkpoints.
        checkpoint = None if self.restart else checkpoints.find_checkpoint(self.folder)
        # Only once: restoring again keeps the run's checkpoints.
        self.restart = False
        if checkpoint is None:
            if self.branch_from is None:
                return 0
            checkpoint = checkpoints.open_checkpoint(self.branch_from)
            _check_random_states(checkpoint)
            # Drops the other run's measurements and position within its epoch.
            begun = {"finished": False, "history": {}, "callbacks": {}, "best": None}
            state = {**checkpoint.state, **begun}
            checkpoint = dataclasses.replace(checkpoint, state=state)
            self._begins_metrics = True
        else:
            _check_random_states(checkpoint)
            self._check(checkpoint)
        state = checkpoint.state
        model.optimizer.build(model.trainable_variables)
        checkpoint.restore(_groups(model))
        set_random_states(state["random"])
        self._restored, self.last = checkpoint, checkpoint.path
        self.progress.step, self.finished = checkpoint.step, state["finished"]
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.best_step, self.best_row = state.get("best") or (None, None)
        # After its end, an extended run has the metrics of its last test.
        self._begins_metrics |= self.finished
        return checkpoint.step

    def restore_best(self, model: keras.Model) -> bool:
        """Restores the best epoch's weights; if that is impossible, warns."""
        try:
            if self.best_step is None:
                raise ValueError(f"there is no best checkpoint in {self.folder}")
            checkpoint = checkpoints.open_checkpoint(
                checkpoints.step_folder(self.folder, self.best_step)
            )
        except ValueError as error:
            warnings.warn(f"The model is that of the last epoch: {error}", stacklevel=2)
            return False
        checkpoint.restore(_groups(model))
        # As at the end of `fit`, averages replace the weights.
        model.optimizer.finalize_variable_values(model.trainable_weights)
        return True

    def around(
        self, callbacks: Sequence[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        """Returns all callbacks for `fit`, this one in its place among `callbacks`."""
        self._callbacks = list(callbacks)
        self.progress.hand_to(self._callbacks)
        if self._restored is not None:
            states = self._restored.state["callbacks"]
            for name, callback in self._with_state():
                if name in states:
                    callback.set_state(states[name])
        return [_First(self), *self._callbacks, self]

    def on_epoch_begin(self, epoch, logs=None):
        # `fit` has just reset the metrics.
        checkpoint, self._restored = self._restored, None
        if checkpoint is None:
            return
        if self.is_within_epoch and not self._begins_metrics:
            metrics = {"metrics": self.model.metrics_variables}
            checkpoint.restore(metrics)
        set_random_states(checkpoint.state["random"])
        if self.is_within_epoch or self.endless:
            self._random = checkpoint.state["random"]

    def begin_batches(self) -> None:
        """In a resumed run's first batch, restores the backend's random states."""
        # PyTorch draws when an iterator of batches begins, as the run before had done.
        if self._random is not None:
            set_backend_states(self._random)
            self._random = None

    def on_epoch_end(self, epoch, logs=None):
        for name, value in (logs or {}).items():
            if np.ndim(value) == 0:
                self.history.setdefault(name, []).append(float(value))
        self.finished = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        is_due = self.every is None or self.progress.step % self.every == 0
        if self.finished or is_due or (self.best is not None and self.best.improved):
            self.save()

    @property
    def is_within_epoch(self) -> bool:
        """Whether the run is in the middle of an epoch."""
        return self.progress.step % self.steps_per_epoch != 0

    def save(self) -> None:
        """Writes a checkpoint of the current step."""
        model = self.model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        groups = _groups(model)
        step = self.progress.step
        if self.is_within_epoch:
            groups["metrics"] = model.metrics_variables
        best: tuple = (self.best_step, self.best_row)
        if self.best is not None and self.best.improved:
            best = (step, self.best.row)
        state = {
            "settings": self.settings,
            "steps_per_epoch": self.steps_per_epoch,
            "finished": self.finished,
            "history": self.history,
            "best": best,
            "callbacks": {name: x.get_state() for name, x in self._with_state()},
            "random": random_states(),
            "versions": versions(),
        }
        try:
            path = checkpoints.save_checkpoint(
                self.folder,
                step,
                groups,
                state,
                keep=self.keep,
                keep_every=self.keep_every,
                keep_steps=[x for x in best[:1] if x is not None],
            )
        except OSError as error:
            message = (
                f"The checkpoint of step {step} could not be written: {error}; the "
                f"last good one is {self.last}"
            )
            if self.finished:
                raise OSError(message) from error
            warnings.warn(f"{message}. The run goes on without it", stacklevel=2)
        else:
            self.last = path
            # Not earlier: the previous best epoch's checkpoint must survive until now.
            self.best_step, self.best_row = best

    def _check(self, checkpoint: checkpoints.Checkpoint):
        state = checkpoint.state
        saved = {**state["settings"], "steps_per_epoch": state["steps_per_epoch"]}
        given = {**self.settings, "steps_per_epoch": self.steps_per_epoch}
        different = different_settings(saved, given)
        self.changed = {x: saved.get(x) for x in different if x in self.may_differ}
        refused = [text for x, text in different.items() if x not in self.changed]
        if refused:
            raise ValueError(
                f"Expected the settings of the run in {self.folder}; received: "
                f"{', '.join(refused)}. Take another folder (--output), "
                "begin anew (--restart, resume=False), or extend the run (--extend, "
                "extend=True) if its length alone differs"
            )
        old, new = state["versions"], versions()
        if old != new:
            warnings.warn(
                f"The checkpoint in {checkpoint.path} was made with {old}, and this is "
                f"{new}: the run goes on, but not bit for bit",
                stacklevel=3,
            )

    def _with_state(self) -> Iterator[tuple[str, Any]]:
        counts = {}
        for callback in self._callbacks:
            if hasattr(callback, "get_state"):
                name = type(callback).__name__
                counts[name] = counts.get(name, 0) + 1
                yield f"{name} {counts[name]}", callback


class _First(Callback):
    """Runs first: saves within an epoch, and ends a resumed run's partial one."""

    def __init__(self, checkpoint: RunCheckpoint):
        super().__init__()
        self.checkpoint = checkpoint
        self.begins_within_epoch = checkpoint.is_within_epoch
        self.stopped = False
        self.moved = False

    # At the beginning of a batch: if no callback waits for the logs of each step, JAX
    # computes ahead.
    def on_train_batch_begin(self, batch, logs=None):
        checkpoint = self.checkpoint
        checkpoint.begin_batches()
        is_due = checkpoint.every and checkpoint.progress.step % checkpoint.every == 0
        # Nothing is new right after restoring.
        if is_due and checkpoint.is_within_epoch and self.moved:
            checkpoint.save()
        self.moved = True
        checkpoint.progress.begin_step(batch)
        if self.begins_within_epoch and not checkpoint.is_within_epoch:
            # Takes effect after this batch: `fit` leaves the epoch and keeps its
            # iterator.
            self.stopped = self.model.stop_training = True
            self.begins_within_epoch = False

    def on_epoch_begin(self, epoch, logs=None):
        self.checkpoint.progress.begin_epoch(epoch)

    # Other callbacks may still stop the run.
    def on_epoch_end(self, epoch, logs=None):
        if self.stopped:
            self.stopped = self.model.stop_training = False


def _check_random_states(checkpoint):
    if "keras" not in checkpoint.state.get("random", ()):
        raise ValueError(
            "Expected the checkpoint of a run, with the random states of this version "
            f"of keras_moe; received: {checkpoint.path}. Begin the run anew "
            "(--restart), or end it with the version that began it"
        )


def _groups(model) -> dict[str, Sequence[keras.Variable]]:
    return {
        # Together with the states of seeds.
        "model": [*model.trainable_variables, *model.non_trainable_variables],
        "optimizer": list(model.optimizer.variables),
    }


def different_settings(
    saved: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, str]:
    """What differs between settings, by name, as a text."""
    return {
        name: f"{name}={given.get(name)!r} (there {saved.get(name)!r})"
        for name in sorted({*saved, *given})
        if saved.get(name) != given.get(name)
    }


def versions() -> dict[str, str]:
    """Returns the versions of this library, Keras and the backend."""
    backend = keras.backend.backend()
    return {
        "keras_moe": __version__,
        "keras": keras.__version__,
        backend: importlib.import_module(backend).__version__,
    }
