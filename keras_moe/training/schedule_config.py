"""The section `schedule` of a recipe: how long it trains, and how fast."""

import dataclasses
from typing import Any

import keras

from keras_moe.checks import (
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
)
from keras_moe.training.best_epoch import check_best
from keras_moe.training.schedules import (
    DECAYS,
    check_cooldown,
    check_length,
    warmup_schedule,
)
from keras_moe.training.section import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The length of a run, its learning rates, and which of its epochs counts.

    A step is an update of the weights, with or without accumulation.

    Args:
        learning_rate: the learning rate at the end of the warm-up.
        epochs: passes over the training images, or None where there are `steps`.
        steps: number of steps, instead of `epochs`.
        warmup_steps: steps in which the learning rate rises linearly from 0.
        decay: `"cosine"` or `"linear"`, to `final_learning_rate` at the last step;
            `"rsqrt"`, a reciprocal square root, or `"constant"`.
        timescale: time constant of `"rsqrt"`: so many steps after the warm-up, the
            learning rate is 0.71 of that at its end.
        cooldown_steps: the last steps, in which the learning rate of `"rsqrt"` or
            `"constant"` falls linearly to `final_learning_rate`.
        final_learning_rate: the learning rate after the last step of the schedule.
        schedule_steps: steps of the schedule, where it is not as long as the run: after
            them the run continues with `final_learning_rate`. None for all its steps.
        monitor: a metric of the history by which epochs are compared; None for the
            objective's headline metric.
        monitor_mode: `"max"` or `"min"`, see `BestEpoch`.
        patience: epochs without a better one after which the run ends; None for never.
        best: `"keep"` keeps the checkpoint of the best epoch beside the newest ones;
            `"restore"` gives the model its weights at the end, too. None for neither.

    Raises:
        ValueError: if a setting is out of range, or is not JSON.

    Example:

    >>> from keras_moe.training import ScheduleConfig
    >>> config = ScheduleConfig(learning_rate=1e-3, epochs=2)
    >>> config.replace(steps=80).epochs is None
    True
    """

    title = "schedule"

    learning_rate: float
    epochs: int | None = None
    steps: int | None = None
    warmup_steps: int = 0
    decay: str = "cosine"
    timescale: int = 10_000
    cooldown_steps: int = 0
    final_learning_rate: float = 0.0
    schedule_steps: int | None = None
    monitor: str | None = None
    monitor_mode: str | None = None
    patience: int | None = None
    best: str | None = None

    def __post_init__(self):
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "Expected either epochs or steps; "
                f"received: epochs={self.epochs!r}, steps={self.steps!r}"
            )
        length = "steps" if self.epochs is None else "epochs"
        for name in ("timescale", length):
            check_integer(name, getattr(self, name))
        for name in ("warmup_steps", "cooldown_steps"):
            check_integer(name, getattr(self, name), minimum=0)
        check_not_negative("final_learning_rate", self.final_learning_rate)
        check_positive("learning_rate", self.learning_rate)
        check_one_of("decay", self.decay, DECAYS)
        check_cooldown(self.decay, self.cooldown_steps, self.final_learning_rate)
        if self.schedule_steps is not None:
            check_integer("schedule_steps", self.schedule_steps)
        check_best(self.monitor, self.monitor_mode, self.patience, self.best)
        super().__post_init__()

    def replace(self, **changes: Any) -> "ScheduleConfig":
        """A schedule with other settings.

        Args:
            **changes: any setting. `epochs` and `steps` take each other's place.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        for name, other in (("epochs", "steps"), ("steps", "epochs")):
            if changes.get(name) is not None:
                changes.setdefault(other, None)
        return super().replace(**changes)

    def total_steps(self, steps_per_epoch: int, accumulated: int = 1) -> int:
        """Updates of the weights in the run.

        Args:
            steps_per_epoch: batches in an epoch.
            accumulated: batches for each update.
        """
        batches = check_integer("steps_per_epoch", steps_per_epoch)
        if self.steps is not None:
            return self.steps
        return self.epochs * batches // accumulated

    def passes(self, steps_per_epoch: int, accumulated: int = 1) -> int:
        """Number of epochs that `fit` needs, the last of which may end early.

        Args:
            steps_per_epoch: batches in an epoch.
            accumulated: batches for each update.
        """
        batches = check_integer("steps_per_epoch", steps_per_epoch)
        if self.epochs is not None:
            return self.epochs
        return -(-self.steps * accumulated // batches)

    def new_schedule(
        self, steps_per_epoch: int, accumulated: int = 1
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate by step.

        Args:
            steps_per_epoch: batches in an epoch.
            accumulated: batches for each update.

        Raises:
            ValueError: if the warm-up is as long as the run, the cooldown begins
                before its end, or the run goes on with a learning rate of 0.
        """
        total = self.total_steps(steps_per_epoch, accumulated)
        steps = self.schedule_steps or total
        check_length(
            steps, total, self.decay, self.cooldown_steps, self.final_learning_rate
        )
        if self.warmup_steps >= steps:
            raise ValueError(
                f"Expected a warm-up shorter than the run, which has {steps} steps "
                f"(epochs={self.epochs}, {steps_per_epoch} batches in an epoch); "
                f"received: warmup_steps={self.warmup_steps}"
            )
        return warmup_schedule(
            self.decay,
            self.learning_rate,
            steps,
            self.warmup_steps,
            self.final_learning_rate,
            self.timescale,
            self.cooldown_steps,
        )
