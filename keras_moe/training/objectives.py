"""Objectives of training: labels, loss, metrics, and the metric to compare models by.

An objective is a section of a recipe, and a class registered under a name; your own
stand next to these.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import keras

from keras_moe import data, models
from keras_moe.checks import check_integer, check_one_of
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from keras_moe.training.callbacks import MODES
from keras_moe.training.data_sections import DataConfig, Datasets, ImageData
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.sections import ModelConfig, Section, json_copy

OBJECTIVES: dict[str, type] = {}


class Monitor(NamedTuple):
    """The metric by which an objective compares models.

    Attributes:
        metric: name of the metric in the history, such as `"val_accuracy"`.
        mode: `"max"` or `"min"`, what is better.
    """

    metric: str
    mode: str = "max"


class Objective(Section):
    """Base class of objectives: everything that `train` asks of a task.

    A subclass is a frozen dataclass of its settings, which files and overrides reach
    as `objective.NAME`, registered by `register_objective`. In its methods `config` is
    the recipe's `data` section, `data_dir` the folder of TensorFlow Datasets, and
    `num_classes` None if the objective has no classes.

    Attributes:
        name: name in recipes, which `register_objective` sets.
        monitor: the metric of the history by which models are compared.
        data_section: the class of the recipe's `data` section.

    Example:

    >>> import dataclasses
    >>> from keras_moe.training import Monitor, Objective, Recipe, register_objective
    >>> @register_objective("brightness")
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Brightness(Objective):
    ...     scale: float = 1.0
    ...     monitor = Monitor("val_mae", "min")
    ...     def model_arguments(self, num_classes):
    ...         return {"num_classes": 1}
    ...     def loss_and_metrics(self, model, data):
    ...         return "mse", ["mae"]
    >>> recipe = Recipe(
    ...     "mine",
    ...     data={"batch_size": 8},
    ...     model={"preset": "vmoe_digits", "load_weights": False},
    ...     schedule={"learning_rate": 1e-3, "epochs": 1},
    ...     objective={"name": "brightness", "scale": 2.0},
    ... )
    >>> recipe.objective
    Brightness(scale=2.0)
    """

    title = "objective"

    name: ClassVar[str]
    monitor: ClassVar[Monitor]
    data_section: ClassVar[type] = ImageData

    def num_classes(self, config: DataConfig, data_dir: str | None = None) -> int:
        """Number of classes of the data; None if the objective has no classes."""
        return None

    def class_names(
        self, config: DataConfig, data_dir: str | None = None
    ) -> tuple[str, ...] | None:
        """Names of the classes in the order of the labels, or None if unknown."""
        return None

    def model_arguments(self, num_classes: int | None) -> dict[str, Any]:
        """Arguments of `keras_moe.models.from_preset` that the objective needs."""
        return {}

    def new_model(
        self, config: ModelConfig, num_classes: int | None, seed: int
    ) -> keras.Model:
        """The model, not yet compiled."""
        return models.from_preset(
            config.preset,
            dtype=config.dtype,
            load_weights=config.load_weights,
            seed=seed,
            **{
                **json_copy("overrides", config.overrides),
                **self.model_arguments(num_classes),
            },
        )

    def prepare(
        self,
        model: keras.Model,
        config: DataConfig,
        data_dir: str | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Gives a new model what it takes from the data: the class names.

        `run_folder` is that of a run's checkpoints, for what a resumed run needs again;
        None for a run without checkpoints.
        """
        set_class_names(model, self.class_names(config, data_dir))

    def taken_from_data(self, model: keras.Model) -> dict[str, str]:
        """Digests of what `prepare` took from the data, which a resumed run needs."""
        return {}

    def datasets(
        self,
        config: DataConfig,
        model: keras.Model,
        batch_size: int,
        seed: int,
        data_dir: str | None = None,
        start_step: int = 0,
    ) -> Datasets:
        """The batches to train and to evaluate on, `start_step` batches into the run.

        Batch n must depend on the settings and n alone, or no run resumes exactly.
        """
        raise NotImplementedError

    def loss_and_metrics(
        self, model: keras.Model, config: DataConfig
    ) -> tuple[Any, list]:
        """The loss and the weighted metrics of `compile`.

        Metrics take sample weights, so that padding in a batch does not count.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All settings and the name, JSON-serialisable."""
        return {"name": self.name, **super().to_dict()}

    def replace(self, **changes: Any) -> "Objective":
        """An objective with other settings; another `name` drops the old ones."""
        name = changes.pop("name", self.name)
        if name != self.name:
            return new_objective({"name": name, **changes})
        settings = super().to_dict()
        return type(self).from_settings({**settings, **changes})


def register_objective(name: str) -> Callable[[type], type]:
    """A class decorator that gives an objective its name in recipes.

    Args:
        name: the name; an objective of the same name is replaced.

    Example: see `Objective`.
    """

    def register(cls: type) -> type:
        is_objective = isinstance(cls, type) and issubclass(cls, Objective)
        monitor = getattr(cls, "monitor", None)
        if (
            not is_objective
            or not dataclasses.is_dataclass(cls)
            or not isinstance(monitor, Monitor)
        ):
            raise ValueError(
                "Expected a dataclass of Objective with a `monitor`; "
                f"received: {cls!r}, monitor={monitor!r}"
            )
        check_one_of("mode", monitor.mode, MODES)
        cls.name = name
        OBJECTIVES[name] = cls
        return cls

    return register


def new_objective(settings: Mapping[str, Any]) -> Objective:
    """An objective from the settings of a file."""
    settings = dict(settings)
    name = settings.pop("name", Classification.name)
    cls = OBJECTIVES[check_one_of("objective.name", name, sorted(OBJECTIVES))]
    return cls.from_settings(settings)


def set_class_names(model: Any, names: tuple[str, ...] | None) -> None:
    """Gives a model's `ImagePreprocessor` the names of the classes it is trained on.

    Names from its preset are those of other data: None drops them.
    """
    preprocessor = getattr(model, "preprocessor", None)
    if isinstance(preprocessor, models.ImagePreprocessor):
        model.preprocessor = dataclasses.replace(preprocessor, class_names=names)


class LabelledImages(Objective):
    """Base class of objectives whose examples are images with classes."""

    def own_classes(self) -> tuple[str, ...] | None:
        """Names of the classes if the settings determine them, or None."""
        return None

    def label_options(self, config: DataConfig) -> dict[str, Any]:
        """Arguments of `keras_moe.data.load` that make the labels."""
        raise NotImplementedError

    def num_classes(self, config: DataConfig, data_dir: str | None = None) -> int:
        names = self.own_classes()
        if names is not None:
            return len(names)
        return data.num_classes(config.source, data_dir)

    def class_names(
        self, config: DataConfig, data_dir: str | None = None
    ) -> tuple[str, ...] | None:
        names = self.own_classes()
        return data.class_names(config.source, data_dir) if names is None else names

    def model_arguments(self, num_classes: int | None) -> dict[str, Any]:
        return {"num_classes": num_classes}

    def datasets(
        self,
        config: DataConfig,
        model: keras.Model,
        batch_size: int,
        seed: int,
        data_dir: str | None = None,
        start_step: int = 0,
    ) -> Datasets:
        return config.datasets(
            model.backbone.image_shape,
            batch_size,
            seed,
            self.num_classes(config, data_dir),
            data_dir,
            start_step,
            **self.label_options(config),
        )


@register_objective("classification")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(LabelledImages):
    """One class for each image.

    Labels are vectors, as mixup needs, and the loss is their cross-entropy; models with
    `multi_label=True` have the sum of sigmoid losses instead.

    Example:

    >>> from keras_moe.training import Classification
    >>> Classification().monitor
    Monitor(metric='val_accuracy', mode='max')
    """

    monitor = Monitor("val_accuracy")

    def label_options(self, config: DataConfig) -> dict[str, Any]:
        return {"one_hot": True}

    def loss_and_metrics(
        self, model: keras.Model, config: DataConfig
    ) -> tuple[Any, list]:
        loss = "auto"
        if not model.multi_label:
            loss = keras.losses.CategoricalCrossentropy(model.output_activation is None)
        return loss, [keras.metrics.CategoricalAccuracy(name="accuracy")]


@register_objective("multi_label")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabel(LabelledImages):
    """Several classes for each image.

    The model has `multi_label=True`, labels stay class numbers unless an augmentation
    mixes them, and the metrics are precision at 1 and mean average precision.

    Args:
        hierarchy: path of a file of a `keras_moe.data.LabelHierarchy`, or None.
        max_labels: largest number of labels of an image, or None for that of the data;
            see `keras_moe.data.load`.

    Example:

    >>> from keras_moe.training import MultiLabel
    >>> MultiLabel(max_labels=4).monitor.metric
    'val_precision_at_1'
    """

    monitor = Monitor("val_precision_at_1")

    hierarchy: str | None = None
    max_labels: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.hierarchy is not None and not isinstance(self.hierarchy, str):
            raise ValueError(
                "Expected hierarchy to be the path of a file, or None; "
                f"received: hierarchy={self.hierarchy!r}"
            )
        if self.max_labels is not None:
            check_integer("max_labels", self.max_labels)

    def own_classes(self) -> tuple[str, ...] | None:
        if self.hierarchy is None:
            return None
        return tuple(data.LabelHierarchy.load(self.hierarchy).classes)

    def label_options(self, config: DataConfig) -> dict[str, Any]:
        return {
            "one_hot": config.mixes_labels,
            "multi_label": True,
            "hierarchy": self.hierarchy,
            "max_labels": self.max_labels,
        }

    def model_arguments(self, num_classes: int | None) -> dict[str, Any]:
        return {**super().model_arguments(num_classes), "multi_label": True}

    def loss_and_metrics(
        self, model: keras.Model, config: DataConfig
    ) -> tuple[Any, list]:
        numbers = not config.mixes_labels
        from_logits = model.output_activation is None
        loss = SparseSigmoidCrossentropy if numbers else SigmoidCrossentropy
        precision = MeanAveragePrecision(
            model.output.shape[-1], from_logits=from_logits, sparse_labels=numbers
        )
        return loss(from_logits), [PrecisionAt1(numbers), precision]
