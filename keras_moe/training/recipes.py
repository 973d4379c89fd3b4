"""Recipes: training settings as data, in files or as objects."""

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_moe import models
from keras_moe._checks import LARGEST_SEED, check_integer, check_string, nearest, unfit
from keras_moe._files import read_text, shipped_files, write_json
from keras_moe.training import objectives
from keras_moe.training.callbacks import BestEpoch, EvaluateAverages, StopAfterBatches
from keras_moe.training.optimizers import OptimizerConfig
from keras_moe.training.schedules import ScheduleConfig
from keras_moe.training.sections import (
    DataConfig,
    Datasets,
    ImageData,
    ModelConfig,
    PairData,
    Section,
    TextData,
    json_copy,
)

SECTIONS = ("data", "model", "optimizer", "schedule", "objective")
# TOML has no null.
_NONE = "none"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train a model: all settings except the hardware.

    Sections are objects or dicts of settings, as in files. In the methods,
    `steps_per_epoch` is the number of batches in an epoch; a step is an update of the
    weights, which takes several batches with gradient accumulation.

    Args:
        name: name of the recipe.
        data: an `ImageData`, `PairData` or `TextData`, depending on the objective.
        model: a `ModelConfig`: preset and overrides.
        schedule: a `ScheduleConfig`: length and learning rates.
        optimizer: an `OptimizerConfig`.
        objective: a `Classification`, `MultiLabel`, `Contrastive`, `NextToken` or your
            own.
        seed: seed of weights, noise, order and augmentation.
        description: a one-line description.
        reference: source of the published settings.
        notes: deviations from the reference.
        compilation_cache: folder in which JAX keeps compiled programs, so that the next
            run starts without compiling; it changes no result. None for no cache.

    Example:

    >>> from keras_moe.training import Recipe
    >>> recipe = Recipe(
    ...     "mine",
    ...     data={"source": "digits", "batch_size": 32},
    ...     model={"preset": "vmoe_b32", "num_experts": 4},
    ...     schedule={"epochs": 2, "learning_rate": 1e-3},
    ... )
    >>> learning_rate = recipe.learning_rate(steps_per_epoch=40)
    >>> [round(float(learning_rate(step)), 6) for step in (0, 40, 80)]
    [0.001, 0.0005, 0.0]
    """

    name: str
    _: dataclasses.KW_ONLY
    data: DataConfig
    model: ModelConfig
    schedule: ScheduleConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    objective: objectives.Objective = dataclasses.field(
        default_factory=objectives.Classification
    )
    seed: int = 0
    description: str = ""
    reference: str = ""
    notes: str = ""
    compilation_cache: str | None = None

    def __post_init__(self):
        for name in ("name", "description", "reference", "notes"):
            check_string(name, getattr(self, name))
        if set(self.name) & set("/\\") or self.name in ("", ".", ".."):
            raise unfit("a name without folders", name=self.name)
        if self.compilation_cache is not None:
            check_string("compilation_cache", self.compilation_cache)
        check_integer("seed", self.seed, 0, LARGEST_SEED)
        objective = self.objective
        if not isinstance(objective, objectives.Objective):
            objective = objectives.new_objective(_settings_of("objective", objective))
        object.__setattr__(self, "objective", objective)
        classes = {
            "data": objective.data_section,
            "model": ModelConfig,
            "optimizer": OptimizerConfig,
            "schedule": ScheduleConfig,
        }
        for name, cls in classes.items():
            value = getattr(self, name)
            if not isinstance(value, cls):
                section = cls.from_settings(_settings_of(name, value))
                object.__setattr__(self, name, section)
        objective.check_start(self.model)
        if self.data.batch_size % self._accumulated:
            sizes = {"batch_size": self.data.batch_size}
            sizes["gradient_accumulation_steps"] = self._accumulated
            raise unfit("gradient_accumulation_steps to divide batch_size", **sizes)

    @property
    def _accumulated(self) -> int:
        return self.optimizer.gradient_accumulation_steps

    # Settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Recipe":
        """Builds a recipe from the result of `to_dict`."""
        for name, value in settings.items():
            if name not in _TOP_LEVEL:
                raise _unknown_setting(name, value)
        return cls(**settings)

    def replace(self, /, **overrides: Any) -> "Recipe":
        """Returns a copy with changed settings; see also the sections' `replace`.

        Give dotted names, such as `**{"schedule.epochs": 3}`, or a dict of changes per
        section, such as `schedule={"epochs": 3}`. A nested setting is replaced
        entirely unless you name its entry, as in `"model.head.rank"`.
        """
        changes = _changes_by_section(self.to_dict(), overrides)
        objective = self.objective.replace(**changes.pop("objective", {}))
        sections = {name: getattr(self, name) for name in SECTIONS[:-1]}
        if not isinstance(self.data, objective.data_section):
            given = {k: x for k, x in self.data.to_dict().items() if x is not None}
            sections["data"] = objective.data_section.from_settings(given)
        for name, section in sections.items():
            # Copied: the result of `left_out` belongs to one recipe.
            changes[name] = section.replace(**changes.get(name, {}))
        changes["objective"] = objective
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings by section, as JSON data."""
        return {
            field.name: getattr(self, field.name).to_dict()
            if field.name in SECTIONS
            else getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def settings(self) -> dict[str, Any]:
        """Returns all settings by dotted name, as JSON data."""
        settings = {}
        for name, value in self.to_dict().items():
            if name in SECTIONS:
                settings |= {f"{name}.{key}": item for key, item in value.items()}
            else:
                settings[name] = value
        return settings

    def save(self, path: str | os.PathLike) -> None:
        """Writes a `.json` file for `load_recipe`, which names the recipe after it."""
        if Path(path).suffix != ".json":
            raise unfit("a path that ends in .json", path=str(path))
        settings = self.to_dict()
        # The file name serves as name.
        settings.pop("name")
        write_json(path, settings)

    # Training

    def total_steps(self, steps_per_epoch: int) -> int:
        """Returns the number of weight updates in the run."""
        return self.schedule.total_steps(steps_per_epoch, self._accumulated)

    def passes(self, steps_per_epoch: int) -> int:
        """Returns the number of epochs for `fit`; the last one may end early."""
        return self.schedule.passes(steps_per_epoch, self._accumulated)

    def learning_rate(
        self, steps_per_epoch: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Returns the learning rate schedule."""
        return self.schedule.new_schedule(steps_per_epoch, self._accumulated)

    def new_model(self, num_classes: int | None) -> keras.Model:
        """Returns the objective's model, not yet compiled."""
        return self.objective.new_model(self.model, num_classes, self.seed)

    def abstract_model(self, num_classes: int | None) -> keras.Model:
        """Returns the compiled model without values, as `keras_moe.models.abstract`."""
        make = models.abstract
        model = self.objective.new_model(self.model, num_classes, self.seed, make)
        # Learning rates follow from the length of an epoch, and costs do not.
        self.compile(model, steps_per_epoch=10**6)
        return model

    def compile(self, model: keras.Model, steps_per_epoch: int) -> None:
        """Compiles a model with the recipe's optimizer, loss and metrics."""
        optimizer = self.optimizer.new_optimizer(
            self.learning_rate(steps_per_epoch),
            self.schedule.learning_rate,
            [variable.path for variable in model.trainable_variables],
        )
        loss, metrics = self.objective.loss_and_metrics(model, self.data)
        # Weighted, so that padding in a batch does not count.
        model.compile(
            optimizer=optimizer, loss=loss, metrics=None, weighted_metrics=metrics
        )

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the callbacks for `steps` and `ema_momentum`; put them first."""
        callbacks: list[keras.callbacks.Callback] = []
        if self.schedule.steps is not None:
            batches = self.schedule.steps * self._accumulated
            callbacks.append(StopAfterBatches(batches))
        if self.optimizer.ema_momentum is not None:
            callbacks.append(EvaluateAverages())
        return callbacks

    def best_epoch(self) -> BestEpoch | None:
        """Returns the `BestEpoch` callback, which comes last, or None."""
        schedule, monitor = self.schedule, self.objective.monitor
        if schedule.patience is None and schedule.best is None:
            return None
        if schedule.monitor is not None:
            monitor = objectives.Monitor(schedule.monitor, None)
        mode = schedule.monitor_mode or monitor.mode
        return BestEpoch(monitor.metric, mode, schedule.patience)

    def datasets(
        self, model: keras.Model, data_dir: str | None = None, start_step: int = 0
    ) -> Datasets:
        """Returns the batches of the run, starting `start_step` batches into it."""
        return self.objective.datasets(
            self.data,
            model,
            self.data.batch_size // self._accumulated,
            self.seed,
            data_dir,
            start_step,
        )


_TOP_LEVEL = tuple(field.name for field in dataclasses.fields(Recipe))


def list_recipes() -> dict[str, str]:
    """Returns the descriptions of the recipes that ship with the library, by name.

    Example:

    >>> from keras_moe.training import list_recipes
    >>> "mumoe_digits" in list_recipes()
    True
    """
    return {
        name: _read(path)["description"]
        for name, path in shipped_files("recipes", ".toml").items()
    }


def load_recipe(name_or_path: str | os.PathLike, **overrides: Any) -> Recipe:
    """Loads a recipe.

    Args:
        name_or_path: a name of `list_recipes`, a TOML file with a table per section and
            `"none"` for None, or a JSON file of `Recipe.save`.
        **overrides: settings to change, see `Recipe.replace`.

    Example:

    >>> from keras_moe.training import load_recipe
    >>> recipe = load_recipe(
    ...     "mumoe_digits", **{"schedule.epochs": 9, "model.num_layers": 2}
    ... )
    >>> recipe.schedule.epochs, recipe.model.overrides["num_layers"]
    (9, 2)
    """
    shipped = shipped_files("recipes", ".toml")
    path = shipped.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ValueError(
            "Expected the name of a recipe or a TOML or JSON file; received: "
            f"{str(name_or_path)!r} ({nearest(str(name_or_path), list(shipped))}; "
            "keras-moe train --list has all)"
        )
    try:
        recipe = Recipe.from_dict({"name": path.stem, **_read(path)})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{error}, in {path}") from error
    return recipe.replace(**overrides)


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    is_json = path.suffix == ".json"
    return json.loads(text) if is_json else _with_none(tomllib.loads(text))


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_none(item) for item in value]
    return None if value == _NONE else value


# Dotted names


def dotted_names(section: str) -> dict[str, str]:
    """Maps the settings of a section to their dotted names."""
    classes = {
        "data": (ImageData, PairData, TextData),
        "model": (ModelConfig,),
        "optimizer": (OptimizerConfig,),
        "schedule": (ScheduleConfig,),
        "objective": objectives.OBJECTIVES.values(),
    }[section]
    names = (field.name for each in classes for field in dataclasses.fields(each))
    return {name: f"{section}.{name}" for name in names}


def _changes_by_section(current, overrides) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        top, *rest = name.split(".")
        if top not in _TOP_LEVEL or (rest and top not in SECTIONS):
            raise _unknown_setting(name, value)
        if top not in SECTIONS:
            changes[top] = value
        elif not rest:
            changes.setdefault(top, {}).update(_settings_of(top, value))
        else:
            section = changes.setdefault(top, {})
            before = section.get(rest[0], current[top].get(rest[0]))
            section[rest[0]] = _changed(before, name, rest[1:], value)
    return changes


def _settings_of(section, value) -> dict[str, Any]:
    if isinstance(value, Section):
        return value.to_dict()
    if not isinstance(value, Mapping):
        example = next(iter(dotted_names(section).values()))
        expected = f"{section} to be a dict of settings, such as {example}"
        raise unfit(expected, f"{section}={value!r}")
    return dict(value)


def _unknown_setting(name, value) -> ValueError:
    """Returns an error with the settings that a name may have meant."""
    dotted = [x for section in SECTIONS for x in dotted_names(section).values()]
    names = {x: x for x in dotted}
    if "." not in name:
        names = {x.rpartition(".")[2]: x for x in reversed(dotted)}
        names |= {x: x for x in _TOP_LEVEL if x not in SECTIONS}
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return ValueError(
        f"Expected settings of a recipe; received: {name}={value!r} "
        f"(nearest: {', '.join(names[x] for x in close) or _TOP_LEVEL})"
    )


def _changed(value, name, path, new):
    """Returns a setting with another value at a path inside it."""
    if not path:
        return new
    if value is not None and not isinstance(value, dict):
        raise unfit(f"a dict of settings at {name.rpartition('.')[0]}", repr(value))
    inside = json_copy(name, value or {})
    return {**inside, path[0]: _changed(inside.get(path[0]), name, path[1:], new)}
