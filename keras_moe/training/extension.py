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
    """Says what becomes of the learning rate of a run that is extended."""
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
