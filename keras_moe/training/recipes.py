"""Published training settings as data."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_moe.checks import LARGEST_SEED, check_integer
from keras_moe.files import write_json
from keras_moe.training.best_epoch import BestEpoch
from keras_moe.training.data_config import DataConfig
from keras_moe.training.datasets import Datasets
from keras_moe.training.model_config import ModelConfig
from keras_moe.training.objectives import Classification, Objective, new_objective
from keras_moe.training.optimizer_config import OptimizerConfig
from keras_moe.training.progress import StopAfterBatches
from keras_moe.training.schedule_config import ScheduleConfig
from keras_moe.training.section import Section
from keras_moe.training.setting_names import (
    SECTIONS,
    changes_by_section,
    nearest_setting,
    settings_of,
)
from keras_moe.training.weight_averages import EvaluateAverages


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train a model: everything but the machine.

    Sections are given as objects, or as dicts of their settings, as files have them.
    The learning rate has a warm-up and a decay, for which the number of steps must be
    known; hence `compile` asks for it. A step is an update of the weights, with or
    without accumulation.

    Args:
        name: name of the recipe.
        data: the images, a `DataConfig`.
        model: the preset and its overrides, a `ModelConfig`.
        schedule: length and learning rates, a `ScheduleConfig`.
        optimizer: the optimizer, an `OptimizerConfig`.
        objective: labels, loss and metrics, an `Objective`: `Classification`,
            `MultiLabel` or one of your own.
        seed: seed of weights, noise, order and augmentation.
        description: a line about it.
        reference: source of the published settings.
        notes: differences from there.

    Raises:
        ValueError: if a setting is unknown or out of range, or is not JSON.

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
    >>> recipe.replace(schedule={"epochs": 3}, seed=1).total_steps(40)
    120
    """

    name: str
    data: DataConfig
    model: ModelConfig
    schedule: ScheduleConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    objective: Objective = dataclasses.field(default_factory=Classification)
    seed: int = 0
    description: str = ""
    reference: str = ""
    notes: str = ""

    def __post_init__(self):
        for name in ("name", "description", "reference", "notes"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"Expected {name} to be a string; "
                    f"received: {name}={getattr(self, name)!r}"
                )
        if set(self.name) & set("/\\") or self.name in ("", ".", ".."):
            raise ValueError(
                f"Expected a name without folders; received: name={self.name!r}"
            )
        check_integer("seed", self.seed, 0, LARGEST_SEED)
        for name, cls in SECTIONS.items():
            section = _section(name, cls, getattr(self, name))
            object.__setattr__(self, name, section)
        if self.data.batch_size % self._accumulated:
            raise ValueError(
                "Expected gradient_accumulation_steps to divide batch_size; received: "
                f"gradient_accumulation_steps={self._accumulated}, "
                f"batch_size={self.data.batch_size}"
            )

    @property
    def _accumulated(self) -> int:
        return self.optimizer.gradient_accumulation_steps

    # Settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Recipe":
        """Makes a recipe from the result of `to_dict`.

        Args:
            settings: a name, and settings by section.

        Raises:
            ValueError: if a setting is unknown, missing or out of range.
        """
        names = {field.name: None for field in dataclasses.fields(cls)}
        for name, value in settings.items():
            if name not in names:
                raise ValueError(
                    "Expected settings of a recipe; "
                    f"received: {name}={value!r} ({nearest_setting(name, names)})"
                )
        # A section says itself what is missing in it.
        needed = {"data": {}, "model": {}, "schedule": {}}
        return cls(**{**needed, **settings})

    def replace(self, /, **overrides: Any) -> "Recipe":
        """A recipe with other settings.

        Args:
            **overrides: settings by their dotted names, such as
                `**{"schedule.epochs": 3, "model.num_experts": 8}`; or sections as
                dicts of the settings to change, such as `schedule={"epochs": 3}`. A
                dotted name that goes deeper, such as `"model.head.rank"`, changes a
                nested setting, which is otherwise replaced as a whole. See the
                sections' own `replace`, too.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        changes = changes_by_section(self.to_dict(), overrides)
        for name in SECTIONS:
            # A copy where nothing changes: what is found out about the data is not
            # handed on.
            changes[name] = getattr(self, name).replace(**changes.get(name, {}))
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings by section, JSON-serialisable, as `Recipe` takes them."""
        return {
            field.name: getattr(self, field.name).to_dict()
            if field.name in SECTIONS
            else getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def settings(self) -> dict[str, Any]:
        """All settings by their dotted names, JSON-serialisable."""
        settings = {}
        for name, value in self.to_dict().items():
            if name in SECTIONS:
                settings |= {f"{name}.{key}": item for key, item in value.items()}
            else:
                settings[name] = value
        return settings

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file that `load_recipe` reads, as a whole or not at all.

        Args:
            path: path of the file, whose name without suffix becomes the recipe's.

        Raises:
            ValueError: if the path does not end in `.json`.
        """
        if Path(path).suffix != ".json":
            raise ValueError(
                f"Expected a path that ends in .json; received: path={str(path)!r}"
            )
        settings = self.to_dict()
        # The file's name says it.
        settings.pop("name")
        write_json(path, settings)

    # Training

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the weights in the run.

        Args:
            steps_per_epoch: batches in an epoch: with accumulation, several for each
                update.
        """
        return self.schedule.total_steps(steps_per_epoch, self._accumulated)

    def passes(self, steps_per_epoch: int) -> int:
        """How many epochs `fit` needs; `callbacks` end the last one in time.

        Args:
            steps_per_epoch: batches in an epoch.
        """
        return self.schedule.passes(steps_per_epoch, self._accumulated)

    def learning_rate(
        self, steps_per_epoch: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate by step.

        Args:
            steps_per_epoch: batches in an epoch.

        Raises:
            ValueError: as `ScheduleConfig.new_schedule`.
        """
        return self.schedule.new_schedule(steps_per_epoch, self._accumulated)

    def new_model(self, num_classes: int | None) -> keras.Model:
        """The model of the objective, not yet compiled for this recipe.

        Args:
            num_classes: number of classes of a new head; None where the objective has
                none.
        """
        return self.objective.new_model(self.model, num_classes, self.seed)

    def prepare(
        self,
        model: keras.Model,
        data_dir: str | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Gives a new model what the objective takes from the data.

        Args:
            model: a model of the objective, which gets class names or a tokenizer.
            data_dir: folder of TensorFlow Datasets.
            run_folder: folder of a run's checkpoints, which keeps a trained tokenizer.

        Raises:
            ValueError: as `keras_moe.data.load` and `keras_moe.data.load_captions`.
        """
        self.objective.prepare(model, self.data, data_dir, run_folder)

    def compile(self, model: keras.Model, steps_per_epoch: int) -> None:
        """Gives a model the recipe's optimizer, loss and metrics.

        Args:
            model: a model of the objective.
            steps_per_epoch: batches in an epoch; the schedule ends with the last one.

        Raises:
            ValueError: if the optimizer does not exist, or a group has no weights in
                the model.
        """
        optimizer = self.optimizer.new_optimizer(
            self.learning_rate(steps_per_epoch),
            self.schedule.learning_rate,
            [variable.path for variable in model.trainable_variables],
        )
        loss, metrics = self.objective.loss_and_metrics(model, self.data)
        # Weighted, so that examples which fill up a batch count for nothing.
        model.compile(
            optimizer=optimizer, loss=loss, metrics=None, weighted_metrics=metrics
        )

    def compiled_model(
        self, num_classes: int | None, steps_per_epoch: int
    ) -> keras.Model:
        """The compiled model.

        Args:
            num_classes: number of classes of a new head.
            steps_per_epoch: batches in an epoch; the schedule ends with the last one.

        Raises:
            ValueError: as `keras_moe.models.from_preset`, `learning_rate` and
                `compile`.
        """
        self.learning_rate(steps_per_epoch)  # Before a large model is made for nothing.
        model = self.new_model(num_classes)
        self.compile(model, steps_per_epoch)
        return model

    def callbacks(self, start_step: int = 0) -> list[keras.callbacks.Callback]:
        """Returns the callbacks that `fit` needs besides the compiled model, put first.

        With `steps` the run ends at the last one, within an epoch if need be. With
        `ema_momentum` the averages of the weights take the weights' place for each
        evaluation, and at the end.

        Args:
            start_step: number of batches before, of a run that is resumed.
        """
        callbacks: list[keras.callbacks.Callback] = []
        if self.schedule.steps is not None:
            batches = self.schedule.steps * self._accumulated
            callbacks.append(StopAfterBatches(batches, start_step))
        if self.optimizer.ema_momentum is not None:
            callbacks.append(EvaluateAverages())
        return callbacks

    def best_epoch(self) -> BestEpoch | None:
        """The callback that compares epochs, put after others; None if none should."""
        schedule, headline = self.schedule, self.objective.headline
        if schedule.patience is None and schedule.best is None:
            return None
        if schedule.monitor is None:
            mode = schedule.monitor_mode or headline.mode
            return BestEpoch(headline.metric, mode, schedule.patience)
        return BestEpoch(schedule.monitor, schedule.monitor_mode, schedule.patience)

    def datasets(
        self, model: keras.Model, data_dir: str | None = None, start_step: int = 0
    ) -> Datasets:
        """The batches that the objective trains and evaluates on.

        Args:
            model: the model, whose inputs they fit.
            data_dir: folder of TensorFlow Datasets.
            start_step: number of batches before, of a run that is resumed.

        Raises:
            ValueError: as `keras_moe.data.load`, and if no batch can be filled.
        """
        return self.objective.datasets(
            self.data,
            model,
            self.data.batch_size // self._accumulated,
            self.seed,
            data_dir,
            start_step,
        )

    def num_classes(self, data_dir: str | None = None) -> int | None:
        """Number of classes of the data, or None where the objective has none.

        Args:
            data_dir: folder of TensorFlow Datasets.

        Raises:
            ValueError: as `keras_moe.data.num_classes`.
        """
        return self.objective.num_classes(self.data, data_dir)

    def class_names(self, data_dir: str | None = None) -> tuple[str, ...] | None:
        """Names of the classes in the order of the labels, or None if nobody knows.

        Args:
            data_dir: folder of TensorFlow Datasets.

        Example:

        >>> from keras_moe.training import load_recipe
        >>> load_recipe("vmoe_digits").class_names()[:3]
        ('0', '1', '2')
        """
        return self.objective.class_names(self.data, data_dir)


def _section(name, cls, value) -> Section:
    if isinstance(value, cls):
        return value
    settings = settings_of(name, value)
    return new_objective(settings) if cls is Objective else cls.from_settings(settings)
