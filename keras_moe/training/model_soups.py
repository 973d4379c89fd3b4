"""Model soups: averages of several checkpoints' weights, and branches of a run."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_moe import models
from keras_moe._checks import check_bool, check_integer, unfit
from keras_moe._compat import restored
from keras_moe._files import regular_file
from keras_moe.models.saving._weights_file import checked_weights
from keras_moe.training.checkpoints import is_checkpoint, open_checkpoint
from keras_moe.training.recipes import Recipe
from keras_moe.training.schedules import OPEN_ENDED


class Soup(NamedTuple):
    """The ingredients of a soup.

    Attributes:
        ingredients: indices of checkpoints in the order added, possibly repeated.
        scores: metric after each addition.
        single_scores: metric of each checkpoint alone.
    """

    ingredients: tuple[int, ...]
    scores: tuple[float, ...]
    single_scores: tuple[float, ...]


def greedy_soup(
    model: keras.Model,
    checkpoints: Sequence,
    metric: Callable[[keras.Model], float],
    replacement: bool = True,
    max_ingredients: int = 16,
) -> Soup:
    """Averages the checkpoints that are best together into a model.

    Starts with the best checkpoint. Each round tries to add every checkpoint to the
    average and keeps the one with the highest metric, until none improves it.

    Only floats are averaged: integers come from the best checkpoint, and seeds stay
    the model's. In addition to the model, three sets of weights are in memory.

    Args:
        model: a model of the checkpoints' shapes, which gets the soup's weights. Its
            optimizer is unchanged.
        checkpoints: `.weights.h5` or `.keras` files, folders of `save_to_preset` or of
            a run's checkpoints, or lists of arrays as from `model.get_weights()`; they
            may be mixed.
        metric: function from the model to a validation metric, higher is better.
        replacement: whether a checkpoint may be added more than once.
        max_ingredients: maximum number of ingredients.

    Reference: *LIMoE*, appendix A.3; *Model soups*, section 2.
    Example:

    >>> from keras_moe.training import greedy_soup
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> checkpoints = [[np.full((1, 1), x), np.zeros(1)] for x in (0.0, 3.0)]
    >>> def metric(model):
    ...     return 1 - abs(model.get_weights()[0].item() - 1)
    >>> soup = greedy_soup(model, checkpoints, metric)
    >>> soup.ingredients, soup.scores  # the mean of 0, 3 and 0 is 1
    ((0, 1, 0), (0.0, 0.5, 1.0))
    """
    checkpoints = list(checkpoints)
    if not checkpoints:
        raise ValueError("Expected at least one checkpoint; received: none")
    check_bool("replacement", replacement)
    check_integer("max_ingredients", max_ingredients)
    quantised = [x for x in model.weights if x.dtype in ("int8", "uint8")]
    if quantised:
        expected = "a model whose weights are floats, made before it is quantised"
        raise unfit(expected, f"{quantised[0].path} of {quantised[0].dtype}")
    with restored(model.variables):
        soup = _greedy_soup(model, checkpoints, metric, replacement, max_ingredients)
        weights = model.get_weights()
    model.set_weights(weights)
    return soup


def _greedy_soup(model, checkpoints, metric, replacement, max_ingredients):
    averaged = [x for x in model.weights if keras.backend.is_float_dtype(x.dtype)]
    totals: list[Any] = [0.0] * len(averaged)
    ingredients, scores, singles = [], [], []

    def load(index):
        """Loads a checkpoint, and returns the sums with its weights."""
        try:
            _load_weights(model, checkpoints[index])
        except (ValueError, OSError, KeyError, TypeError) as error:
            expected = "the weights of the model"
            raise unfit(expected, f"checkpoint {index}: {error}") from error
        values = (ops.convert_to_numpy(ops.cast(x, "float32")) for x in averaged)
        return [total + value for total, value in zip(totals, values)]

    def score(index):
        for variable, total in zip(averaged, load(index)):
            variable.assign(total / (len(ingredients) + 1))
        value = float(metric(model))
        if not np.isfinite(value):
            raise unfit("a finite metric", f"{value} with checkpoint {index}")
        return value

    while len(ingredients) < max_ingredients:
        candidates = {
            index: score(index)
            for index in range(len(checkpoints))
            if replacement or index not in ingredients
        }
        # The first round is of each checkpoint alone.
        singles = singles or list(candidates.values())
        if not candidates or (scores and max(candidates.values()) <= scores[-1]):
            break
        best = max(candidates, key=lambda index: candidates[index])
        totals = load(best)
        ingredients.append(best)
        scores.append(candidates[best])
    # Integers are those of the best checkpoint.
    load(ingredients[0])
    for variable, total in zip(averaged, totals):
        variable.assign(total / len(ingredients))
    return Soup(tuple(ingredients), tuple(scores), tuple(singles))


def _load_weights(model, checkpoint):
    if not isinstance(checkpoint, (str, os.PathLike)):
        values = [np.asarray(array) for array in checkpoint]
    elif is_checkpoint(checkpoint):
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        open_checkpoint(checkpoint).restore({"model": variables})
        return
    elif os.fspath(checkpoint).endswith(".weights.h5"):
        optimizer = getattr(model, "optimizer", None)
        skipped = [] if optimizer is None else [optimizer]
        with checked_weights(checkpoint):
            keras.saving.load_weights(model, checkpoint, objects_to_skip=skipped)
        return
    else:
        # These have several weight files, or include an optimizer.
        is_folder = os.path.isdir(checkpoint)
        load: Any = models.from_preset if is_folder else keras.saving.load_model
        checkpoint = checkpoint if is_folder else regular_file(checkpoint)
        values = load(os.fspath(checkpoint), compile=False).weights
    for variable, value in zip(model.weights, values, strict=True):
        variable.assign(value)


def cooldown_branch(
    recipe: Recipe, start_step: int, cooldown_steps: int, **overrides: Any
) -> Recipe:
    """Returns the recipe of a branch that leaves a run at a step and cools down.

    Both have the same learning rates up to that step, so the branch can continue from
    the run's checkpoint with `train(branch, checkpoint_dir=..., branch_from=...)`. Mix
    several branches with `greedy_soup`.

    Args:
        recipe: recipe of the run.
        start_step: step of the checkpoint, in weight updates (with gradient
            accumulation, checkpoints are numbered by batches).
        cooldown_steps: number of steps in which the learning rate falls to
            `final_learning_rate`, 0 by default.
        **overrides: other settings, such as `data={"source": "folder:more"}`.

    Reference:
        *LIMoE*, appendix A.3: after 700k steps a branch of 125k, and three of 40k from
        step 650k, two of them with other data.
    Example:

    >>> from keras_moe.training import Recipe, cooldown_branch
    >>> run = Recipe(
    ...     "run",
    ...     data={"batch_size": 8},
    ...     model={"preset": "vmoe_b16"},
    ...     schedule={"steps": 700_000, "learning_rate": 1e-3, "decay": "rsqrt"},
    ... )
    >>> branch = cooldown_branch(run, 650_000, 40_000)
    >>> branch.name, branch.schedule.steps, branch.schedule.cooldown_steps
    ('run_cooldown_650000_40000', 690000, 40000)
    """
    check_integer("start_step", start_step, minimum=0)
    check_integer("cooldown_steps", cooldown_steps)
    schedule = recipe.schedule
    if schedule.decay not in OPEN_ENDED:
        expected = f"a decay among {OPEN_ENDED}, whatever the length of the run"
        raise unfit(expected, decay=schedule.decay)
    for name in ("warmup_steps", "cooldown_steps"):
        if 0 < getattr(schedule, name) < 1:
            expected = "a number of steps, as a share changes with the length"
            raise unfit(expected, **{name: getattr(schedule, name)})
    last = float("inf") if schedule.steps is None else schedule.steps
    if not schedule.warmup_steps <= start_step <= last - schedule.cooldown_steps:
        raise ValueError(
            f"Expected a branch after the warm-up of {schedule.warmup_steps} steps and "
            f"before the cooldown of {schedule.cooldown_steps}, in a run of "
            f"steps={schedule.steps}; received: start_step={start_step}"
        )
    settings = {
        "name": f"{recipe.name}_cooldown_{start_step}_{cooldown_steps}",
        "schedule.steps": start_step + cooldown_steps,
        "schedule.cooldown_steps": cooldown_steps,
        "schedule.schedule_steps": None,
    }
    return recipe.replace(**{**settings, **overrides})
