"""How far a run is: one count of its steps, which all of its callbacks read."""

from collections.abc import Iterable

import keras


class Progress:
    """The number of steps that a run has made, and the epoch that it is in.

    A run makes one, restores it from its newest checkpoint, and hands it to its
    callbacks. Each of them reports the batches that it sees; the count follows the
    numbers that `fit` gives them, so it does not matter how many callbacks report.
    """

    def __init__(self, step: int = 0):
        self.step = step
        self.epoch = 0
        self._before_epoch = step

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins, whose first batch is number 0."""
        self.epoch = epoch
        self._before_epoch = self.step

    def begin_step(self, batch: int) -> None:
        """Notes that the step of a batch begins."""
        self.step = self.step_of(batch)

    def step_of(self, batch: int) -> int:
        """The number of steps once that of a batch of this epoch is made."""
        return self._before_epoch + batch + 1

    def hand_to(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Makes callbacks of a run read this count instead of their own."""
        for callback in callbacks:
            if isinstance(callback, ProgressCallback):
                callback.progress = self


class ProgressCallback(keras.callbacks.Callback):
    """Base class of callbacks that depend on the number of steps.

    Within a run they read its `Progress`; alone in `fit` they count for themselves.
    Subclasses that override a method call this class's first.
    """

    def __init__(self, step: int = 0):
        super().__init__()
        self.progress = Progress(step)

    def on_epoch_begin(self, epoch, logs=None):
        self.progress.begin_epoch(epoch)

    # Reported as the batch begins: a callback at its end makes JAX wait for each step.
    def on_train_batch_begin(self, batch, logs=None):
        self.progress.begin_step(batch)


class StopAfterBatches(ProgressCallback):
    """Ends `fit` after so many batches of a run."""

    def __init__(self, batches: int, step: int = 0):
        super().__init__(step)
        self.batches = batches

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        # `fit` reads this once the batch is done.
        if self.progress.step >= self.batches:
            self.model.stop_training = True
