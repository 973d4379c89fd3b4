"""Runs that are extended after their end, for more epochs or steps."""

import warnings

from keras_moe.training.recipes import Recipe

# Settings that may change in a run that is extended: its length, and its patience.
EXTENDABLE = (
    "schedule.epochs",
    "schedule.steps",
    "schedule.schedule_steps",
    "schedule.patience",
)


def check_extension(
    recipe: Recipe, before: dict, steps_per_epoch: int, batches: int
) -> bool:
    """Says what becomes of the learning rate of a run that is extended.

    `"rsqrt"` and `"constant"` without a cooldown do not depend on the run's length: the
    run is the one that had been longer from its start. So is a run whose
    `schedule_steps` are as many as it had steps before: it continues with
    `final_learning_rate`. Otherwise the schedule is that of the longer run, in which
    the rate is higher at the same step, and there is a warning with both.

    Args:
        recipe: the longer run's.
        before: settings of `EXTENDABLE` that were others before, by dotted name.
        steps_per_epoch: batches in an epoch.
        batches: number of batches trained on.

    Returns:
        Whether there is anything left to train.

    Raises:
        ValueError: if the run is not longer than before.

    Example:

    >>> from keras_moe.training import Recipe
    >>> from keras_moe.training.extension import check_extension
    >>> recipe = Recipe(
    ...     "mine",
    ...     data={"batch_size": 8},
    ...     model={"preset": "vmoe_digits", "load_weights": False},
    ...     schedule={"learning_rate": 1e-3, "epochs": 3, "decay": "constant"},
    ... )
    >>> check_extension(recipe, {"schedule.epochs": 2}, 10, batches=20)
    True
    """
    old = recipe.replace(**before)
    total = recipe.total_steps(steps_per_epoch)
    if total < old.total_steps(steps_per_epoch):
        raise ValueError(
            f"Expected a run of at least {old.total_steps(steps_per_epoch)} steps to "
            f"extend; received: {total} steps"
        )
    step = batches // recipe.optimizer.gradient_accumulation_steps
    rates = [float(x.learning_rate(steps_per_epoch)(step)) for x in (old, recipe)]
    if abs(rates[1] - rates[0]) > 1e-6 * recipe.schedule.learning_rate:
        before_steps = old.schedule.schedule_steps or old.total_steps(steps_per_epoch)
        warnings.warn(
            f"After step {step} the learning rate goes from {rates[0]:.3g} to "
            f"{rates[1]:.3g}, that of a run of {total} steps with decay="
            f"{recipe.schedule.decay!r}; with schedule_steps={before_steps} it goes on "
            "with final_learning_rate",
            stacklevel=3,
        )
    return step < total
