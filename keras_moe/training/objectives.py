"""Training objectives: labels, loss, metrics, and the metric to compare models by."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import keras

from keras_moe import data, evaluation, models
from keras_moe._checks import check_bool, check_integer, check_one_of, unfit
from keras_moe._processes import process_shard
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from keras_moe.models.registry import is_architecture
from keras_moe.training.callbacks import MODES
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.sections import (
    DataConfig,
    Datasets,
    ImageData,
    ModelConfig,
    Section,
    json_copy,
)

OBJECTIVES: dict[str, type] = {}


class Monitor(NamedTuple):
    """The metric by which an objective compares models.

    Attributes:
        metric: name of a metric in the history, such as `"val_accuracy"`.
        mode: `"max"` or `"min"`.
    """

    metric: str
    mode: str | None = "max"


class Objective(Section):
    """Base class of objectives: everything that `train` needs to know about a task.

    Subclasses are frozen dataclasses of their settings, registered with
    `register_objective`. In the methods, `config` is the recipe's `data` section and
    `data_dir` the folder of TensorFlow Datasets.

    Attributes:
        name: name in recipes, set by `register_objective`.
        monitor: metric in the history by which models are compared.
        data_section: class of the recipe's `data` section.

    Example:

    >>> import dataclasses
    >>> from keras_moe.training import Monitor, Objective, register_objective
    >>> @register_objective("brightness")
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Brightness(Objective):
    ...     scale: float = 1.0
    ...     monitor = Monitor("val_mae", "min")
    ...     def model_arguments(self, num_classes):
    ...         return {"num_classes": 1}
    ...     def loss_and_metrics(self, model, data):
    ...         return "mse", ["mae"]
    >>> Brightness(scale=2.0).replace(scale=3.0)
    Brightness(scale=3.0)
    """

    title = "objective"

    name: ClassVar[str]
    monitor: ClassVar[Monitor]
    data_section: ClassVar[type] = ImageData

    def num_classes(
        self, config: DataConfig, data_dir: str | None = None
    ) -> int | None:
        """Returns the number of classes of the data, or None."""
        return None

    def class_names(
        self, config: DataConfig, data_dir: str | None = None
    ) -> tuple[str, ...] | None:
        """Returns the class names in the order of the labels, or None if unknown."""
        return None

    def model_arguments(self, num_classes: int | None) -> dict[str, Any]:
        """Returns the arguments of `from_preset` that the objective needs."""
        return {}

    def check_start(self, config: ModelConfig) -> None:
        """Raises ValueError if runs cannot start from a model; `Recipe` calls it."""

    def new_model(
        self,
        config: ModelConfig,
        num_classes: int | None,
        seed: int,
        make: Callable[..., Any] = models.from_preset,
    ) -> keras.Model:
        """Returns an uncompiled model, made by `make`."""
        return make(
            config.preset,
            dtype=config.dtype,
            # An architecture's weights are random, and meant to be.
            load_weights=config.load_weights and not is_architecture(config.preset),
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
        """Gives a new model what it needs from the data; `run_folder` keeps it."""
        set_class_names(model, self.class_names(config, data_dir))

    def probe(
        self, model: keras.Model, config: DataConfig, data_dir: str | None = None
    ) -> float | None:
        """Returns what a linear probe of a new model's features scores, if wanted."""
        return None

    def taken_from_data(self, model: keras.Model, config: DataConfig) -> dict[str, str]:
        """Returns digests of what `prepare` and `datasets` took from the data."""
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
        """Returns batches from `start_step` on, functions of settings and step only."""
        raise NotImplementedError

    def loss_and_metrics(
        self, model: keras.Model, config: DataConfig
    ) -> tuple[Any, list]:
        """Returns the loss and the `weighted_metrics` for `compile`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and all settings as JSON data."""
        return {"name": self.name, **super().to_dict()}

    def replace(self, **changes: Any) -> "Objective":
        """Returns a copy with changed settings; a new `name` drops the old settings."""
        name = changes.pop("name", self.name)
        if name != self.name:
            return new_objective({"name": name, **changes})
        settings = super().to_dict()
        return type(self).from_settings({**settings, **changes})


def register_objective(name: str) -> Callable[[type], type]:
    """Class decorator that registers an objective under a name for recipes.

    Args:
        name: the name; replaces a previous objective of that name.

    Example: see `Objective`.
    """

    def register(cls: type) -> type:
        check_one_of("mode", cls.monitor.mode, MODES)
        cls.name = name
        OBJECTIVES[name] = cls
        return cls

    return register


def new_objective(settings: Mapping[str, Any]) -> Objective:
    """Builds an objective from the settings of a file."""
    settings = dict(settings)
    name = settings.pop("name", Classification.name)
    cls = OBJECTIVES[check_one_of("objective.name", name, sorted(OBJECTIVES))]
    return cls.from_settings(settings)


def set_class_names(model: Any, names: tuple[str, ...] | None) -> None:
    """Sets the class names of a model's preprocessor; None removes the preset's."""
    preprocessor = getattr(model, "preprocessor", None)
    if isinstance(preprocessor, models.ImagePreprocessor):
        model.preprocessor = dataclasses.replace(preprocessor, class_names=names)


class LabelledImages(Objective):
    """Base class of objectives on images with classes."""

    def label_options(self, config: ImageData) -> dict[str, Any]:
        """Returns the arguments of `keras_moe.data.load` that make the labels."""
        raise NotImplementedError

    def num_classes(self, config, data_dir=None):
        return data.num_classes(config.source, data_dir)

    def class_names(self, config, data_dir=None):
        return data.class_names(config.source, data_dir)

    def model_arguments(self, num_classes):
        return {"num_classes": num_classes}

    def datasets(
        self, config: ImageData, model, batch_size, seed, data_dir=None, start_step=0
    ):
        exclude, exclude_from_test = config.left_out(data_dir)
        count = data.num_examples(config.source, config.train_split, data_dir, exclude)
        steps = config.steps_per_epoch(count, batch_size)
        common = {
            "batch_size": batch_size,
            "seed": seed,
            "data_dir": data_dir,
            **self.label_options(config),
        }
        train, *tests = train_and_test(
            data.load,
            config,
            model,
            {**common, "exclude": exclude, "start_batch": start_step},
            {**common, "exclude": exclude_from_test},
        )
        num_classes = self.num_classes(config, data_dir)
        return Datasets(train, tests[0], num_classes, steps, tests[1])


def train_and_test(
    load: Callable, config: DataConfig, model: Any, of_train: dict, of_test: dict
) -> tuple[Any, Any, Any]:
    """Loads endless training batches and the test batches, and a shuffling loader."""
    if (most := getattr(model.backbone, "max_patches", None)) is not None:
        expected = "a model of images of one shape for a recipe's images"
        raise unfit(expected, max_patches=most)
    common = {
        "image_shape": tuple(model.backbone.image_shape),
        "shard": process_shard(),
    }
    of_train = {**common, "augment": config.augment, "repeat": True, **of_train}
    train = load(config.source, config.train_split, shuffle=True, **of_train)
    test = functools.partial(
        load, config.evaluated_source, config.test_split, **common, **of_test
    )
    return train, test(shuffle=False), functools.partial(test, shuffle=True)


@register_objective("classification")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(LabelledImages):
    """One class per image.

    Labels are vectors, as mixup needs, and the loss is softmax cross-entropy, or the
    sum of sigmoid losses for models with `multi_label=True`.

    Args:
        linear_probe: whether a run first measures a linear probe of the model's
            features, which shows what fine-tuning adds; see
            `keras_moe.evaluation.linear_probe`. It reads all images once, and needs a
            preset with weights.

    Example:

    >>> from keras_moe.training import Classification
    >>> Classification().monitor
    Monitor(metric='val_accuracy', mode='max')
    """

    monitor = Monitor("val_accuracy")

    linear_probe: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_bool("linear_probe", self.linear_probe)

    def check_start(self, config):
        is_random = is_architecture(config.preset) or not config.load_weights
        if self.linear_probe and is_random:
            raise ValueError(
                "Expected a preset with weights, whose features linear_probe measures; "
                f"received: preset={config.preset!r}, load_weights="
                f"{config.load_weights}, whose weights are random. Name a trained one, "
                "such as hf://timm/vit_small_patch16_224.augreg_in21k "
                "(docs/weights.md), or train from random weights with "
                "--recipe-set objective.linear_probe=false"
            )

    def probe(self, model, config: ImageData, data_dir=None):
        if not self.linear_probe:
            return None
        shape, excluded = model.backbone.image_shape, config.left_out(data_dir)
        splits = (config.train_split, config.test_split)
        options = {"shuffle": False, "data_dir": data_dir}
        features, sets = keras.Model(model.input, model.features), []
        for split, exclude in zip(splits, excluded):
            options["exclude"] = exclude
            own = data.load(config.source, split, shape, config.batch_size, **options)
            sets += evaluation.extract_features(features, own, verbose=0)
        num_classes = self.num_classes(config, data_dir)
        return evaluation.linear_probe(*sets, num_classes=num_classes)

    def label_options(self, config):
        return {"one_hot": True}

    def loss_and_metrics(self, model, config):
        loss = "auto"
        if not model.multi_label:
            loss = keras.losses.CategoricalCrossentropy(model.output_activation is None)
        return loss, [keras.metrics.CategoricalAccuracy(name="accuracy")]


@register_objective("multi_label")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabel(LabelledImages):
    """Several classes per image.

    Uses models with `multi_label=True`. Labels are class numbers unless an augmentation
    mixes them.

    Args:
        max_labels: see `keras_moe.data.load`.

    Example:

    >>> from keras_moe.training import MultiLabel
    >>> MultiLabel(max_labels=4).monitor.metric
    'val_precision_at_1'
    """

    monitor = Monitor("val_precision_at_1")

    max_labels: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integer("max_labels", self.max_labels, optional=True)

    def label_options(self, config):
        return {
            "one_hot": config.mixes_labels,
            "multi_label": True,
            "max_labels": self.max_labels,
        }

    def model_arguments(self, num_classes):
        return {**super().model_arguments(num_classes), "multi_label": True}

    def loss_and_metrics(self, model: Any, config: ImageData):
        numbers = not config.mixes_labels
        from_logits = model.output_activation is None
        loss = SparseSigmoidCrossentropy if numbers else SigmoidCrossentropy
        precision = MeanAveragePrecision(
            model.output.shape[-1], from_logits=from_logits, sparse_labels=numbers
        )
        return loss(from_logits), [PrecisionAt1(numbers), precision]
