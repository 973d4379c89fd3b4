"""Learning rates that rise from zero to a peak, and fall until the last step."""

import keras
from keras import ops

from keras_moe.ops.checks import (
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
)

DECAYS = ("cosine", "linear")


@keras.saving.register_keras_serializable("keras_moe")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises on a line from 0 to a peak, then falls on a line to the last step.

    Keras's own schedules with a warm-up fall along a cosine.

    Args:
        peak: the learning rate at the end of the warm-up.
        total_steps: at this step and after it the rate is `final`.
        warmup_steps: how many steps it rises.
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


def warmup_schedule(
    decay: str, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> keras.optimizers.schedules.LearningRateSchedule:
    """A schedule with a linear warm-up from 0 and a decay.

    Args:
        decay: `"cosine"` or `"linear"`.
        peak: the learning rate at the end of the warm-up.
        total_steps: the run's.
        warmup_steps: how many of these it rises.
        final: the learning rate after the last step.

    Returns:
        The schedule.

    Raises:
        ValueError: if an argument is out of range, as is a warm-up as long as the run.

    Example:

    >>> from keras_moe.training import warmup_schedule
    >>> schedule = warmup_schedule("cosine", 0.5, total_steps=30, warmup_steps=10)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 20, 30)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """
    check_one_of("decay", decay, DECAYS)
    check_warmup(warmup_steps, total_steps)
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
