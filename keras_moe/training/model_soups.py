"""Model soups: averages of several checkpoints' weights, and branches of a run."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

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
        average = _Average(model, checkpoints, metric)
        soup = _greedy_soup(average, replacement, max_ingredients)
        weights = model.get_weights()
    model.set_weights(weights)
    return soup


def _greedy_soup(average, replacement, max_ingredients):
    indices = range(len(average.checkpoints))
    singles = [average.score(index, alone=True) for index in indices]
    average.add(int(np.argmax(singles)))
    scores = [max(singles)]
    while len(average.ingredients) < max_ingredients:
        candidates = {
            index: average.score(index)
            for index in indices
            if replacement or index not in average.ingredients
        }
        if not candidates or max(candidates.values()) <= scores[-1]:
            break
        best = max(candidates, key=lambda index: candidates[index])
        average.add(best)
        scores.append(candidates[best])
    average.assign()
    return Soup(tuple(average.ingredients), tuple(scores), tuple(singles))


class _Average:
    """The sum of the ingredients so far, and a model to try them with."""

    def __init__(self, model, checkpoints, metric):
        self.model, self.checkpoints, self.metric = model, checkpoints, metric
        self.averaged = [
            x for x in model.weights if keras.backend.is_float_dtype(x.dtype)
        ]
        self.totals = [np.zeros(x.shape, "float32") for x in self.averaged]
        self.ingredients: list[int] = []

    def score(self, index: int, alone: bool = False) -> float:
        """Returns the metric of a checkpoint, alone or added to the average."""
        self._load(index)
        if not alone:
            for variable, total in zip(self.averaged, self.totals, strict=True):
                mean = (total + _to_numpy(variable)) / (len(self.ingredients) + 1)
                variable.assign(mean)
        value = float(self.metric(self.model))
        if not np.isfinite(value):
            raise unfit("a finite metric", f"{value} with checkpoint {index}")
        return value

    def add(self, index: int) -> None:
        """Adds a checkpoint to the average."""
        self._load(index)
        for variable, total in zip(self.averaged, self.totals, strict=True):
            total += _to_numpy(variable)
        self.ingredients.append(index)

    def assign(self) -> None:
        """Gives the model the average weights and the best checkpoint's integers."""
        self._load(self.ingredients[0])
        for variable, total in zip(self.averaged, self.totals, strict=True):
            variable.assign(total / len(self.ingredients))

    def _load(self, index):
        try:
            _load_weights(self.model, self.checkpoints[index])
        except (ValueError, OSError, KeyError, TypeError) as error:
            expected = "the weights of the model"
            raise unfit(expected, f"checkpoint {index}: {error}") from error


def _to_numpy(variable) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))


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
        raise ValueError(
            f"Expected a decay among {OPEN_ENDED}, whose learning rates do not depend "
            f"on the run's length; received: decay={schedule.decay!r}"
        )
    for name in ("warmup_steps", "cooldown_steps"):
        if 0 < getattr(schedule, name) < 1:
            raise ValueError(
                "Expected a number of steps, since a share of the run would change "
                f"with its length; received: {name}={getattr(schedule, name)!r}"
            )
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
