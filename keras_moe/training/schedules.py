"""Learning rates that rise from zero to a peak, and fall until the last step."""

import keras
from keras import ops

from keras_moe.checks import (
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
)

DECAYS = ("cosine", "linear", "rsqrt", "constant")
# The run's length changes nothing in these before the cooldown.
OPEN_ENDED = ("rsqrt", "constant")


@keras.saving.register_keras_serializable("keras_moe")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises on a line from 0 to a peak, then falls on a line to the last step.

    Keras's own schedules with a warm-up fall along a cosine.

    Args:
        peak: the learning rate at the end of the warm-up.
        total_steps: first step at which the rate is `final`.
        warmup_steps: number of steps for which it rises.
        final: the last learning rate.

    Call arguments:
        step: the number of steps that were made before.

    Raises:
        ValueError: if an argument is out of range.

    Example:

    >>> from keras_moe.training import WarmupLinearDecay
    >>> schedule = WarmupLinearDecay(0.5, total_steps=30, warmup_steps=10)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 20, 30)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """

    def __init__(
        self, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
    ):
        super().__init__()
        self.peak = check_positive("peak", peak)
        self.total_steps = check_integer("total_steps", total_steps)
        self.warmup_steps = check_warmup(warmup_steps, total_steps)
        self.final = check_not_negative("final", final)

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rising = step / max(self.warmup_steps, 1)
        left = (self.total_steps - step) / (self.total_steps - self.warmup_steps)
        falling = self.final + (self.peak - self.final) * ops.clip(left, 0.0, 1.0)
        return ops.where(step < self.warmup_steps, self.peak * rising, falling)

    def get_config(self):
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "final": self.final,
        }


@keras.saving.register_keras_serializable("keras_moe")
class WarmupCooldown(keras.optimizers.schedules.LearningRateSchedule):
    """Rises to a peak, falls as a reciprocal square root or stays, and cools down.

    With w warm-up steps, timescale s and a cooldown of n steps that ends at step T:

        peak step / w                            for step < w
        peak / sqrt(1 + (step - w) / s)          for w <= step <= T - n
        on a line to `final`                     for T - n <= step <= T

    The rate before the cooldown does not depend on T: from any checkpoint a run may be
    resumed, or branch off into a cooldown.

    Args:
        peak: the learning rate at the end of the warm-up.
        total_steps: the last step of the cooldown.
        warmup_steps: number of steps for which it rises.
        timescale: number of steps after the warm-up at which the rate is
            peak / sqrt(2); None for a constant rate.
        cooldown_steps: number of steps for which it falls linearly; 0 for no cooldown.
        final: the learning rate after the cooldown.

    Call arguments:
        step: the number of steps that were made before.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Scaling Vision Transformers*, section 3.5, in the form of the V-MoE release
        (`big_vision_rsqrt_schedule`). big_vision's own goes on dividing by the square
        root during the cooldown, which is no line then.

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
        warmup_steps: int = 0,
        timescale: int | None = None,
        cooldown_steps: int = 0,
        final: float = 0.0,
    ):
        super().__init__()
        self.peak = check_positive("peak", peak)
        self.total_steps = check_integer("total_steps", total_steps)
        self.warmup_steps = check_warmup(warmup_steps, total_steps)
        if timescale is not None:
            check_integer("timescale", timescale)
        self.timescale = timescale
        self.cooldown_steps = check_integer("cooldown_steps", cooldown_steps, minimum=0)
        self.final = check_not_negative("final", final)
        if warmup_steps + cooldown_steps > total_steps:
            raise ValueError(
                f"Expected warm-up and cooldown in a run of {total_steps} steps; "
                f"received: warmup_steps={warmup_steps}, "
                f"cooldown_steps={cooldown_steps}"
            )

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
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "timescale": self.timescale,
            "cooldown_steps": self.cooldown_steps,
            "final": self.final,
        }


def warmup_schedule(
    decay: str,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    final: float = 0.0,
    timescale: int = 10_000,
    cooldown_steps: int = 0,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """A schedule with a linear warm-up from 0 and a decay.

    Args:
        decay: `"cosine"` or `"linear"`, to `final` at the last step; `"rsqrt"`, the
            reciprocal square root; or `"constant"`.
        peak: the learning rate at the end of the warm-up.
        total_steps: the run's.
        warmup_steps: number of these in which it rises.
        final: the learning rate after the last step; with `"rsqrt"` and `"constant"`
            of the cooldown.
        timescale: timescale of `"rsqrt"`, see `WarmupCooldown`.
        cooldown_steps: number of steps in which `"rsqrt"` and `"constant"` fall
            linearly.

    Returns:
        The schedule.

    Raises:
        ValueError: if an argument is out of range, as is a warm-up as long as the run,
            or if there is a cooldown and the decay has none.

    Example:

    >>> from keras_moe.training import warmup_schedule
    >>> schedule = warmup_schedule("cosine", 0.5, total_steps=30, warmup_steps=10)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 20, 30)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """
    check_one_of("decay", decay, DECAYS)
    check_positive("peak", peak)
    check_not_negative("final", final)
    check_warmup(warmup_steps, total_steps)
    check_cooldown(decay, cooldown_steps, final)
    if decay in OPEN_ENDED:
        timescale = timescale if decay == "rsqrt" else None
        return WarmupCooldown(
            peak, total_steps, warmup_steps, timescale, cooldown_steps, final
        )
    if decay == "linear":
        return WarmupLinearDecay(peak, total_steps, warmup_steps, final)
    # Keras counts the steps of the decay from the end of the warm-up.
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup_steps else peak,
        total_steps - warmup_steps,
        alpha=final / peak,
        warmup_target=peak if warmup_steps else None,
        warmup_steps=warmup_steps,
    )


def check_warmup(warmup_steps: int, total_steps: int) -> int:
    """`warmup_steps`, if the learning rate can fall after them."""
    if check_integer("warmup_steps", warmup_steps, minimum=0) >= total_steps:
        raise ValueError(
            f"Expected a warm-up shorter than the run of {total_steps} steps; "
            f"received: warmup_steps={warmup_steps}"
        )
    return warmup_steps


def check_cooldown(decay: str, cooldown_steps: int, final: float) -> None:
    """Raises ValueError if a decay does not go with a cooldown, or with its end."""
    if cooldown_steps and decay not in OPEN_ENDED:
        raise ValueError(
            f"Expected cooldown_steps=0 with a decay to the last step; received: "
            f"cooldown_steps={cooldown_steps}, decay={decay!r}"
        )
    if final and decay in OPEN_ENDED and not cooldown_steps:
        raise ValueError(
            f"Expected cooldown_steps >= 1 for the final learning rate of "
            f"decay={decay!r}; received: cooldown_steps=0, "
            f"final_learning_rate={final!r}"
        )


def check_length(
    steps: int, total: int, decay: str, cooldown_steps: int, final: float
) -> None:
    """Raises ValueError if a run continues after its schedule and learns nothing."""
    falls = decay not in OPEN_ENDED or cooldown_steps
    if steps < total and falls and not final:
        raise ValueError(
            f"Expected final_learning_rate > 0 for the {total - steps} steps of a run "
            f"after its schedule; received: final_learning_rate={final!r}, "
            f"schedule_steps={steps}"
        )
