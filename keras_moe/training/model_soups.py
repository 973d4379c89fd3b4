"""Model soups: averages of several checkpoints' weights, and branches of a run."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import models
from keras_moe.checks import check_bool, check_integer
from keras_moe.models.weights_file import checked_weights
from keras_moe.training.checkpoints import (
    is_checkpoint,
    is_remote,
    open_checkpoint,
)
from keras_moe.training.recipes import Recipe
from keras_moe.training.schedules import OPEN_ENDED


class Soup(NamedTuple):
    """The ingredients of a soup.

    Attributes:
        ingredients: indices of checkpoints in the order they were added, repeated if
            added several times.
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
    average and keeps the one with the highest metric, until none improves it. A round
    evaluates the model once per checkpoint.

    Only floats are averaged: integers come from the best checkpoint, and seeds stay
    the model's. In addition to the model, two sets of weights are in memory, however
    many checkpoints there are.

    Args:
        model: a model of the checkpoints' shapes, which gets the soup's weights. Its
            optimizer is unchanged.
        checkpoints: `.weights.h5` or `.keras` files, folders of `save_to_preset` or of
            a run's checkpoints, or lists of arrays as from `model.get_weights()`; they
            may be mixed.
        metric: function from the model to a validation metric, higher is better.
        replacement: whether a checkpoint may be added more than once.
        max_ingredients: maximum number of ingredients.

    Reference:
        *LIMoE*, appendix A.3; *Model soups*, section 2.
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
    for variable in model.weights:
        if variable.dtype in ("int8", "uint8"):
            raise ValueError(
                "Expected a model whose weights are floats, made before it is "
                f"quantised; received: {variable.path} of {variable.dtype}"
            )
    before = [keras.ops.convert_to_numpy(x) for x in model.variables]
    weights = {id(x) for x in model.weights}
    done = False
    try:
        soup = _cook(_Pot(model, checkpoints, metric), replacement, max_ingredients)
        done = True
    finally:
        for variable, value in zip(model.variables, before, strict=True):
            if not done or id(variable) not in weights:
                variable.assign(value)
    return soup


def _cook(pot, replacement, max_ingredients):
    count = range(len(pot.checkpoints))
    singles = [pot.score_alone(position) for position in count]
    pot.add(int(np.argmax(singles)))
    scores = [max(singles)]
    while len(pot.ingredients) < max_ingredients:
        candidates = {
            position: pot.score_with(position)
            for position in count
            if replacement or position not in pot.ingredients
        }
        if not candidates or max(candidates.values()) <= scores[-1]:
            break
        best = max(candidates, key=candidates.get)
        pot.add(best)
        scores.append(candidates[best])
    pot.serve()
    return Soup(tuple(pot.ingredients), tuple(scores), tuple(singles))


class _Pot:
    """The sum of the ingredients so far, and a model to try them with."""

    def __init__(self, model, checkpoints, metric):
        self.model, self.checkpoints, self.metric = model, checkpoints, metric
        floats = (x for x in model.weights if keras.backend.is_float_dtype(x.dtype))
        self.averaged = list(floats)
        self.totals = [np.zeros(x.shape, "float32") for x in self.averaged]
        self.ingredients: list[int] = []

    def score_alone(self, position: int) -> float:
        _load(self.model, self.checkpoints, position)
        return self._score(position)

    def score_with(self, position: int) -> float:
        """Returns the metric of the soup with one more checkpoint."""
        _load(self.model, self.checkpoints, position)
        for variable, total in zip(self.averaged, self.totals, strict=True):
            mean = (total + _numpy(variable)) / (len(self.ingredients) + 1)
            variable.assign(mean)
        return self._score(position)

    def add(self, position: int) -> None:
        _load(self.model, self.checkpoints, position)
        for variable, total in zip(self.averaged, self.totals, strict=True):
            total += _numpy(variable)
        self.ingredients.append(position)

    def serve(self) -> None:
        """Gives the model the soup's weights and the best checkpoint's integers."""
        _load(self.model, self.checkpoints, self.ingredients[0])
        for variable, total in zip(self.averaged, self.totals, strict=True):
            variable.assign(total / len(self.ingredients))

    def _score(self, position):
        value = float(self.metric(self.model))
        if not np.isfinite(value):
            raise ValueError(
                f"Expected a finite metric; received: {value} with checkpoint "
                f"{_name(self.checkpoints, position)}"
            )
        return value


def cooldown_branch(
    recipe: Recipe, start_step: int, cooldown_steps: int, **overrides: Any
) -> Recipe:
    """Returns the recipe of a branch that leaves a run at a step and cools down.

    Both have the same learning rates up to that step, so the branch can continue from
    the run's checkpoint: `train(branch, checkpoint_dir=..., branch_from=...)` keeps its
    weights, optimizer and position in the data. Mix branches of several lengths, or
    with other data, with `greedy_soup`.

    Args:
        recipe: recipe of the run.
        start_step: step of the checkpoint, in weight updates (with gradient
            accumulation, checkpoints are numbered by batches).
        cooldown_steps: number of steps in which the learning rate falls to
            `final_learning_rate`, 0 by default.
        **overrides: other settings, such as `data={"source": "folder:more"}`.

    Returns:
        The recipe, named after the branch unless `name` is given.

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


def _numpy(variable) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))


def _name(checkpoints, position) -> str:
    """Returns the name of a checkpoint for an error message."""
    checkpoint = checkpoints[position]
    is_path = isinstance(checkpoint, (str, os.PathLike))
    return f"{position}, {os.fspath(checkpoint)}" if is_path else f"{position}"


def _load(model: keras.Model, checkpoints: Sequence, position: int) -> None:
    """Loads a checkpoint's weights into the model."""
    checkpoint, name = checkpoints[position], _name(checkpoints, position)
    if not isinstance(checkpoint, (str, os.PathLike)):
        _assign(model.weights, [np.asarray(array) for array in checkpoint], name)
        return
    path = os.fspath(checkpoint)
    if not is_remote(path) and not os.path.exists(path):
        raise ValueError(
            "Expected a file of weights, or the folder of a preset or a checkpoint; "
            f"received: checkpoint {name}"
        )
    try:
        if is_checkpoint(path):
            variables = [*model.trainable_variables, *model.non_trainable_variables]
            open_checkpoint(path).restore({"model": variables})
            return
        if path.endswith(".weights.h5"):
            optimizer = getattr(model, "optimizer", None)
            skipped = [] if optimizer is None else [optimizer]
            with checked_weights(path):
                keras.saving.load_weights(model, path, objects_to_skip=skipped)
            return
        # These have several weight files, or include an optimizer.
        load = models.from_preset if os.path.isdir(path) else keras.saving.load_model
        other = load(path, compile=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected the weights of the model; received: checkpoint {name}: "
            f"{' '.join(str(error).split())}"
        ) from error
    _assign(model.weights, other.weights, name)


def _assign(variables: Sequence, values: Sequence, name: str) -> None:
    if len(variables) != len(values):
        raise ValueError(
            f"Expected {len(variables)} arrays, one for each of the model's weights; "
            f"received: checkpoint {name} of {len(values)}"
        )
    for variable, value in zip(variables, values, strict=True):
        if tuple(variable.shape) != tuple(value.shape):
            raise ValueError(
                f"Expected {variable.path} of shape {tuple(variable.shape)}; "
                f"received: checkpoint {name} with {tuple(value.shape)}"
            )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
