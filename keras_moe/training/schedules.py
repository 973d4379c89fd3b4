"""Learning rate schedules with warm-up and decay, and the `schedule` section."""

import dataclasses
from typing import Any, Self

import keras
from keras import ops

from keras_moe._checks import (
    argument_names,
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
    check_string,
    unfit,
)
from keras_moe.training.callbacks import MODES
from keras_moe.training.sections import Section

DECAYS = ("cosine", "linear", "rsqrt", "constant")
# Before the cooldown these do not depend on the run's length.
OPEN_ENDED = ("rsqrt", "constant")


@keras.saving.register_keras_serializable("keras_moe")
class WarmupCooldown(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then reciprocal square root or constant, then linear cooldown.

    With w warm-up steps, timescale s and a cooldown of n steps that ends at step T:

        peak step / w                            for step < w
        peak / sqrt(1 + (step - w) / s)          for w <= step <= T - n
        linearly to `final`                      for T - n <= step <= T

    The rate before the cooldown does not depend on T, so a run can be extended, or
    branch off into a cooldown, from any checkpoint.

    Args:
        peak: learning rate at the end of the warm-up.
        total_steps: T, last step of the cooldown.
        warmup_steps: w, number of warm-up steps.
        timescale: s, number of steps until the rate is peak / sqrt(2); None for a
            constant rate.
        cooldown_steps: n, number of cooldown steps.
        final: learning rate after the cooldown.

    Reference: *Scaling Vision Transformers*, section 3.5, as in the V-MoE release.
        big_vision keeps dividing by the square root during the cooldown.

    Example:

    >>> from keras_moe.training import WarmupCooldown
    >>> schedule = WarmupCooldown(
    ...     0.4, total_steps=100, warmup_steps=10, timescale=10, cooldown_steps=60
    ... )
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 40, 70, 100)]
    [0.0, 0.2, 0.4, 0.2, 0.1, 0.0]
    """

    def __init__(
        self,
        peak: float,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        timescale: int | None = None,
        cooldown_steps: int = 0,
        final: float = 0.0,
    ):
        super().__init__()
        self.peak = check_positive("peak", peak)
        self.total_steps = check_integer("total_steps", total_steps)
        self.warmup_steps = _check_warmup(warmup_steps, total_steps)
        self.timescale = check_integer("timescale", timescale, optional=True)
        longest = total_steps - warmup_steps
        check_integer("cooldown_steps", cooldown_steps, 0, longest)
        self.cooldown_steps = cooldown_steps
        self.final = check_not_negative("final", final)

    def __call__(self, step):
        step = ops.cast(step, "float32")
        start = self.total_steps - self.cooldown_steps
        # A cooldown starts from the rate at its first step.
        after = ops.clip(step, self.warmup_steps, start) - self.warmup_steps
        rate = self.peak * ops.ones_like(after)
        if self.timescale is not None:
            rate = rate * ops.rsqrt(1 + after / self.timescale)
        if self.cooldown_steps:
            left = ops.clip((self.total_steps - step) / self.cooldown_steps, 0.0, 1.0)
            rate = self.final + (rate - self.final) * left
        rising = self.peak * step / max(self.warmup_steps, 1)
        return ops.where(step < self.warmup_steps, rising, rate)

    def get_config(self):
        return {name: getattr(self, name) for name in argument_names(type(self))}


def _check_warmup(warmup_steps, total_steps):
    """Returns `warmup_steps` if steps remain for the decay."""
    if check_integer("warmup_steps", warmup_steps, minimum=0) >= total_steps:
        expected = f"a warm-up shorter than the run of {total_steps} steps, or a share"
        raise unfit(expected, warmup_steps=warmup_steps)
    return warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The length of a run, its learning rates, and how to choose its best epoch.

    A step is an update of the weights, with or without accumulation.

    Args:
        learning_rate: learning rate at the end of the warm-up.
        epochs: number of passes over the training data; None if `steps` is given.
        steps: number of steps, instead of `epochs`.
        warmup_steps: number of steps in which the learning rate rises linearly from 0;
            below 1, their share of the schedule.
        decay: `"cosine"` or `"linear"` to `final_learning_rate`, `"rsqrt"` (reciprocal
            square root) or `"constant"`; see `WarmupCooldown`.
        timescale: steps after the warm-up until `"rsqrt"` is at 0.71 of its peak.
        cooldown_steps: number of last steps in which `"rsqrt"` or `"constant"` falls
            linearly to `final_learning_rate`; below 1, their share of the schedule.
        final_learning_rate: learning rate after the last step of the schedule.
        schedule_steps: length of the schedule if the run is longer and continues with
            `final_learning_rate`; None for the entire run.
        monitor: metric by which epochs are compared; None uses the objective's.
        monitor_mode: `"max"` or `"min"`, see `BestEpoch`.
        patience: epochs without improvement after which the run stops, or None.
        best: `"keep"` keeps the checkpoint of the best epoch; `"restore"` also
            restores its weights at the end. None does neither.

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
    warmup_steps: float = 0
    decay: str = "cosine"
    timescale: int = 10_000
    cooldown_steps: float = 0
    final_learning_rate: float = 0.0
    schedule_steps: int | None = None
    monitor: str | None = None
    monitor_mode: str | None = None
    patience: int | None = None
    best: str | None = None

    def __post_init__(self):
        if (self.epochs is None) == (self.steps is None):
            raise unfit("either epochs or steps", epochs=self.epochs, steps=self.steps)
        for name in ("epochs", "steps", "schedule_steps", "patience"):
            check_integer(name, getattr(self, name), optional=True)
        check_integer("timescale", self.timescale)
        for name in ("warmup_steps", "cooldown_steps"):
            if not 0 < check_not_negative(name, getattr(self, name)) < 1:
                check_integer(name, getattr(self, name), minimum=0)
        check_not_negative("final_learning_rate", self.final_learning_rate)
        check_positive("learning_rate", self.learning_rate)
        check_one_of("decay", self.decay, DECAYS)
        is_open = self.decay in OPEN_ENDED
        if self.cooldown_steps and not is_open:
            expected = "cooldown_steps=0 with a decay to the last step"
            raise unfit(expected, cooldown_steps=self.cooldown_steps, decay=self.decay)
        if self.final_learning_rate and is_open and not self.cooldown_steps:
            expected = f"cooldown_steps >= 1 for a final rate of decay={self.decay!r}"
            raise unfit(expected, final_learning_rate=self.final_learning_rate)
        check_one_of("best", self.best, (None, "keep", "restore"))
        if self.monitor is not None:
            check_string("monitor", self.monitor)
        check_one_of("monitor_mode", self.monitor_mode, (None, *MODES))
        compares = self.patience is not None or self.best is not None
        if not compares and (self.monitor or self.monitor_mode):
            expected = "patience or best with monitor and monitor_mode"
            raise unfit(expected, monitor=self.monitor, monitor_mode=self.monitor_mode)
        super().__post_init__()

    def replace(self, **changes: Any) -> Self:
        """Returns a changed copy; `epochs` and `steps` replace each other."""
        for name, other in (("epochs", "steps"), ("steps", "epochs")):
            if changes.get(name) is not None:
                changes.setdefault(other, None)
        return super().replace(**changes)

    def total_steps(self, steps_per_epoch: int, accumulated: int = 1) -> int:
        """Returns the number of weight updates, each of `accumulated` batches."""
        if self.epochs is None:
            return self.steps or 0
        return self.epochs * steps_per_epoch // accumulated

    def passes(self, steps_per_epoch: int, accumulated: int = 1) -> int:
        """Returns the number of epochs for `fit`; the last may end early."""
        if self.epochs is not None:
            return self.epochs
        return -(-(self.steps or 0) * accumulated // steps_per_epoch)

    def new_schedule(
        self, steps_per_epoch: int, accumulated: int = 1
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Returns the learning rate schedule."""
        total = self.total_steps(steps_per_epoch, accumulated)
        steps = self.schedule_steps or total
        falls = self.decay not in OPEN_ENDED or self.cooldown_steps
        if steps < total and falls and not self.final_learning_rate:
            expected = f"final_learning_rate > 0 for {total - steps} more steps"
            raise unfit(expected, final_learning_rate=0.0, schedule_steps=steps)
        peak, final = self.learning_rate, self.final_learning_rate
        warmup = _check_warmup(self.number_of_steps("warmup_steps", steps), steps)
        if self.decay != "cosine":
            falling = steps - warmup
            if self.decay in OPEN_ENDED:
                falling = self.number_of_steps("cooldown_steps", steps)
            timescale = self.timescale if self.decay == "rsqrt" else None
            return WarmupCooldown(
                peak,
                steps,
                warmup_steps=warmup,
                timescale=timescale,
                cooldown_steps=falling,
                final=final,
            )
        # Keras counts the decay steps from the end of the warm-up.
        return keras.optimizers.schedules.CosineDecay(
            0.0 if warmup else peak,
            steps - warmup,
            alpha=final / peak,
            warmup_target=peak if warmup else None,
            warmup_steps=warmup,
        )

    def number_of_steps(self, name: str, schedule_steps: int) -> int:
        """Returns the steps of the warm-up or the cooldown in a schedule."""
        steps = getattr(self, name)
        return round(steps * schedule_steps) if 0 < steps < 1 else steps
