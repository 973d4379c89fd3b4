"""Model sources, and the `Blueprint` that a source and overrides give.

A source is a registered preset, a folder or handle written by `save_to_preset`,
published weights, or a model.
"""

import contextlib
import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from keras_moe._checks import argument_names, check_bool, check_one_of
from keras_moe._compat import variables_without_values
from keras_moe.models import registry
from keras_moe.models._remote import check_file_exists, load_json
from keras_moe.models.conversion import (
    HEAD,
    POOLING,
    PublishedWeights,
    is_convertible,
    open_source,
)
from keras_moe.models.description import Description
from keras_moe.models.loading._overrides import (
    apply_overrides,
    nested_config,
    split_overrides,
    tower_families,
)
from keras_moe.models.saving._lora import FROZEN, TRAINABLE, TRAINING
from keras_moe.models.saving._preset_folder import HUB_MODELS, check_preset, explained
from keras_moe.models.saving._weights_file import SavedWeights
from keras_moe.ops._initializers import skip_init

TASK = "task.json"
ARCHITECTURE, SAVED, PUBLISHED = "architecture", "saved", "published"
BACKBONE = "backbone"
# Towers of image-text models, by the kinds of their inputs.
TOWERS = ("image", "text")

# Arguments of trained tasks that follow from the data.
_OF_DATA = ("num_classes", "preprocessor", "image_preprocessor")

_has_warned_of_random_weights = False


Weights = SavedWeights | PublishedWeights


class ModelSource:
    """A model as described by its source, before overrides."""

    kind: str
    name: str
    backbone: type
    config: dict[str, Any]
    task: type | None
    is_trained = False
    must_fit = False
    class_names = None

    def _take_backbone(self, backbone, config):
        """Sets the backbone, its arguments and its default task."""
        self.backbone, self.config = backbone, config
        self.task = registry.task_class(backbone)

    def task_config(self) -> dict[str, Any]:
        """Task arguments; "preprocessor" is included if set or explicitly None."""
        return {}

    def without_task(self) -> "ModelSource":
        """Returns the same source without its own task."""
        other = copy.copy(self)
        other.task, other.is_trained, other.class_names = None, False, None
        return other

    def explained(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def weights(self, new_weights: tuple[str, ...] = ()) -> Weights | None:
        return None


class TaskConfig(NamedTuple):
    """Task arguments without backbone, and path prefixes of weights to be left new."""

    config: dict[str, Any]
    new_weights: tuple[str, ...] = ()


class _Architecture(ModelSource):
    kind = ARCHITECTURE

    def __init__(self, name, spec):
        self.name, self._spec = name, spec
        self._take_backbone(registry.backbone_class(spec["backbone"]), spec["config"])
        if spec["task"] is not None:
            self.task = registry.named_task_class(spec["task"])
        self.class_names = spec["class_names"]
        # The task of a trained preset is the same without its weights.
        folder, self._saved = spec["weights"], None
        if folder is not None and os.path.isdir(folder):
            self._saved = _Saved(folder, False, name)
            self.is_trained = self._saved.is_trained
            self.task = self._saved.task or self.task
        elif folder is not None and spec["task"] is not None:
            # Missing weights, of a task that has no head to be known.
            self.is_trained = not self.task.has_head

    def task_config(self):
        if self.task is None:
            return {}
        saved = {} if self._saved is None else self._saved.task_config()
        saved = {name: saved[name] for name in _OF_DATA if name in saved}
        return {**saved, **self._spec["task_config"]}


class _Saved(ModelSource):
    kind = SAVED

    def __init__(self, preset, load_weights, name=None):
        self._path, self._load_weights = check_preset(preset), load_weights
        self.name = os.fspath(preset) if name is None else name
        self.must_fit = load_weights
        with explained(self._path):
            self._take_backbone(*self._saved_backbone())
            task, self._saved_task = self._read_task()
        self.is_trained = task is not None
        self.task = task or self.task

    def _saved_backbone(self):
        content = load_json(self._path)
        backbone = _registered_class(content)
        if backbone is None or not registry.is_registered(backbone):
            raise ValueError(
                "Expected a preset of a registered backbone, one of "
                f"{registry.backbone_names()}; received: "
                f"{content.get('registered_name')!r} in {self._path}. {HUB_MODELS}"
            )
        return backbone, content["config"]

    def _read_task(self):
        """Returns the class of the saved task, or None, and its arguments."""
        if not check_file_exists(self._path, TASK):
            return None, {}
        content = load_json(self._path, TASK)
        task = _registered_class(content)
        if task is None:
            raise ValueError(
                "Expected a task that is registered with Keras; received: "
                f"{content.get('registered_name')!r} in {self._path}/{TASK}"
            )
        # Other libraries' tasks have no blueprint.
        return (task if registry.is_task(task) else None), content["config"]

    def task_config(self):
        if not self.is_trained:
            return {}
        config = {k: v for k, v in self._saved_task.items() if k != "backbone"}
        for name in ("preprocessor", "image_preprocessor"):
            if isinstance(config.get(name), dict):
                preprocessor = keras.saving.deserialize_keras_object(config[name])
                if hasattr(preprocessor, "load_preset_assets"):
                    # Such as a tokenizer's vocabulary.
                    preprocessor.load_preset_assets(self._path)
                config[name] = preprocessor
        return config

    def explained(self):
        return explained(self._path, self.name)

    def weights(self, new_weights=()):
        has_head = self.is_trained and not new_weights
        return SavedWeights(self._path, has_head, self._load_weights, self.name)


def _registered_class(content):
    """Returns the class named in a preset's file, or None."""
    return keras.saving.get_registered_object(str(content.get("registered_name")))


class _Published(ModelSource):
    kind = PUBLISHED
    must_fit = True

    def __init__(self, source, overrides, load_weights, tower):
        file, spec = open_source(source, overrides, load_weights, tower)
        self._file, self._spec, self._load_weights = file, spec, load_weights
        is_path = isinstance(source, (str, os.PathLike))
        self.name = os.fspath(source) if is_path else file.path
        self._take_backbone(registry.backbone_class(spec.backbone), spec.arguments)
        self.is_trained = spec.task_arguments is not None

    def task_config(self):
        config = (self._spec.task_arguments or {}) if self.task else {}
        return {**config, **self._spec.preprocessors()}

    def weights(self, new_weights=()):
        return PublishedWeights(
            self.name, self._file, self._spec, new_weights, self._load_weights
        )


def open_model_source(
    source: Any,
    overrides: dict[str, Any],
    load_weights: bool = True,
    counts_only: bool = False,
    tower: str | None = None,
) -> ModelSource:
    """Opens the source of a model."""
    spec = registry.preset(source)
    if spec is not None and spec["weights"] is not None and load_weights:
        if spec["package"] is not None and not os.path.isdir(spec["weights"]):
            raise ValueError(
                f"Expected the package {spec['package']}, which has the weights of "
                f"{source!r} under {spec['license']}; received: no such package. "
                "load_weights=False makes the model with random weights"
            )
        return _Saved(spec["weights"], load_weights, source)
    if spec is not None:
        return _Architecture(source, spec)
    if is_convertible(source):
        return _Published(source, overrides, load_weights and not counts_only, tower)
    return _Saved(source, load_weights)


class UnbuiltTower(NamedTuple):
    """One tower of an unbuilt backbone."""

    # `prefix` starts the paths of its weights, such as "text/"; "" for a single tower.
    # Tokens attend within their sequence; `sequences` has the lengths.
    prefix: str
    blocks: list
    sequences: tuple[int, ...]
    hidden_dim: int


@dataclass(frozen=True)
class Blueprint:
    """Everything that determines a model, before any weight is allocated.

    Use it in a `with` statement to close its source.

    Args:
        backbone: class of the backbone.
        config: arguments of the backbone.
        task: class of the task, or None for a backbone.
        task_config: arguments of the task without its backbone.
        weights: source of the weights; None for random initialisation.
        name: name of the source.

    Example:

    >>> from keras_moe import models
    >>> blueprint = models.resolve("vmoe_b32", {"num_experts": 8})
    >>> blueprint.backbone.__name__, blueprint.task
    ('ViTBackbone', None)
    >>> blueprint.unbuilt_blocks()[1].feed_forward.experts.num_experts
    8
    >>> blueprint.describe().parameters < models.describe("vmoe_b32").parameters
    True
    """

    backbone: type
    config: dict[str, Any]
    task: type | None = None
    task_config: dict[str, Any] = field(default_factory=dict)
    weights: Weights | None = None
    name: str = ""

    @classmethod
    def of_model(cls, model: keras.Model) -> "Blueprint":
        """Creates the blueprint of a backbone or task, without its weights."""
        backbone = getattr(model, "backbone", model)
        if not registry.is_registered(type(backbone)):
            raise ValueError(
                f"Expected a model with one of {registry.backbone_names()}; "
                f"received: {type(model).__name__}"
            )
        config = backbone.get_config()
        if model is backbone:
            return cls(type(backbone), config, name=model.name)
        task_config = {**model.get_config(), "preprocessor": model.preprocessor}
        del task_config["backbone"]
        return cls(type(backbone), config, type(model), task_config, None, model.name)

    def describe(self) -> Description:
        with self._explained():
            parts, num_tokens, dim = self.backbone.describe_parts(**self._sizes())
            if self.task is not None:
                config = self.backbone.make_config(self.config).to_dict()
                parts = parts + self.task.describe_parts(
                    config, num_tokens, dim, **self.task_config
                )
            if self.weights is not None:
                self.weights.check()
        return Description(self.name, num_tokens, parts, dim, self.backbone.example)

    def unbuilt_blocks(self) -> list[keras.layers.Layer]:
        """Creates the blocks of the backbone, unbuilt."""
        with self._explained():
            return self.backbone.unbuilt_blocks(**self._sizes())

    def unbuilt_towers(self) -> list[UnbuiltTower]:
        """Creates the towers of the backbone, unbuilt."""
        families = tower_families(self.backbone)
        with self._explained():
            config = self.backbone.make_config(self.config).to_dict()
            towers = {"": (self.backbone, config)}
            if families:
                towers = {f"{k}/": (cls, config[k]) for k, cls in families.items()}
            return [
                UnbuiltTower(
                    prefix,
                    cls.unbuilt_blocks(**config),
                    cls.sequence_lengths(**config),
                    config["hidden_dim"],
                )
                for prefix, (cls, config) in towers.items()
            ]

    def build(self) -> keras.Model:
        """Creates the model and loads the source's weights, if requested."""
        return self.build_with_report()[0]

    def build_with_report(
        self, progress: Callable[[int, int, str], None] | None = None
    ) -> tuple[keras.Model, Any]:
        """Creates the model; also returns a `ConversionReport` or None."""
        weights = self.weights
        with self._explained():
            with skip_init(weights is not None and weights.fills_backbone()):
                model = self.backbone.from_config(self.config)
            if self.task is not None:
                with skip_init(weights is not None and weights.fills_head()):
                    model = self._task_of(model)
            report = None if weights is None else weights.load(model, progress)
        return model, report

    def build_abstract(self, compiled_like: Any = None) -> keras.Model:
        """Creates the model with weights that have shapes, and no values."""
        with self._explained(), variables_without_values(), skip_init():
            model = self.backbone.from_config(self.config)
            if self.task is not None:
                model = self._task_of(model, compile=False)
        if self.task is not None:
            # Its optimizer has numbers, which have values.
            settings = {}
            if compiled_like is not None and compiled_like.compiled:
                config = keras.optimizers.serialize(compiled_like.optimizer)
                optimizer = keras.optimizers.deserialize(config)
                settings = {"optimizer": optimizer, "loss": compiled_like.loss}
            model.compile(**settings)
        return model

    def _task_of(self, backbone, **changes):
        config = {**self.task_config, **changes, "backbone": backbone}
        return self.task.from_config(config)

    def _sizes(self):
        """The arguments that determine costs, which are the same for every dtype."""
        not_sizes = ("name", "dtype", *TRAINING)
        return {k: v for k, v in self.config.items() if k not in not_sizes}

    def _explained(self):
        if self.weights is None:
            return contextlib.nullcontext()
        return self.weights.explained()

    def close(self) -> None:
        """Closes the source; the blueprint cannot be built afterwards."""
        if self.weights is not None:
            self.weights.close()

    def __enter__(self) -> "Blueprint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def resolve(
    source: Any,
    overrides: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    cls: type | None = None,
    load_weights: bool = True,
    counts_only: bool = False,
    tower: str | None = None,
) -> Blueprint:
    """Returns the blueprint of a model from any source, with overrides.

    `from_preset`, `describe`, `convert`, `upcycle` and `keras_moe.distribution` are
    built on it.

    Args:
        source: preset name, folder, handle, published weights or a model.
        overrides: arguments of the backbone or the task, by name; `num_classes=None`
            means no new head.
        task: task name or `"backbone"`; None decides as in `from_preset`.
        cls: required class of the model, or None for any.
        load_weights: whether the model gets the source's weights.
        counts_only: whether the blueprint is only for descriptions: no weights are
            read, and task arguments are allowed without the task.
        tower: `"image"` or `"text"` for one tower of published image-text weights. None
            means what `cls` or `task` implies, or all.

    Example:

    >>> from keras_moe import models
    >>> overrides = {"num_classes": 10, "activation": "gelu"}
    >>> blueprint = models.resolve("vmoe_digits", overrides)
    >>> blueprint.config["activation"], blueprint.task.__name__
    ('gelu', 'ViTImageClassifier')
    """
    overrides = dict(overrides or {})
    if overrides.get("num_classes") is None:
        overrides.pop("num_classes", None)
    check_bool("load_weights", load_weights)
    if task is not None:
        check_one_of("task", task, (None, BACKBONE, *registry.task_names()))
    if task == BACKBONE and "num_classes" in overrides:
        raise ValueError(
            "Expected no num_classes for task='backbone'; "
            f"received: num_classes={overrides['num_classes']}"
        )
    if isinstance(source, keras.Model) and not is_convertible(source):
        if overrides:
            raise ValueError(
                f"Expected no further arguments with a model; received: {overrides}"
            )
        return Blueprint.of_model(source)
    check_one_of("tower", tower, (None, *TOWERS))
    tower = tower or _tower_of(task, cls, "num_classes" in overrides)
    opened = open_model_source(source, overrides, load_weights, counts_only, tower)
    try:
        return _resolved(opened, overrides, task, cls, counts_only)
    except BaseException:
        if weights := opened.weights():
            weights.close()
        raise


def _tower_of(task, cls, has_classes):
    """Returns the tower that a class or a task implies, or None."""
    backbone = cls
    if cls is not None and registry.is_task(cls):
        backbone, has_classes = cls.backbone_cls, has_classes or _takes_classes(cls)
    if task not in (None, BACKBONE):
        backbone = registry.first_task(task).backbone_cls
    if has_classes:
        return TOWERS[0]
    if backbone is None or not registry.is_registered(backbone):
        return None
    return backbone.example if backbone.example in TOWERS else None


def _resolved(source, overrides, task, cls, counts_only):
    backbone = source.backbone if cls is None else _backbone_class(source, cls)
    task_cls = _task_class(source, backbone, task, cls, "num_classes" in overrides)
    owner = task_cls or (source.task if counts_only else None)
    # These replace what is frozen in the source.
    given = TRAINING if {TRAINABLE, FROZEN} & {*overrides} else ()
    of_backbone, of_task = split_overrides(backbone, owner, overrides)
    with source.explained():
        config = {k: v for k, v in source.config.items() if k not in given}
        config = apply_overrides(backbone, config, of_backbone)
        if source.must_fit:
            saved = nested_config(backbone, source.config)
            config = backbone.config_for_weights(saved, config)
        task_config, new_weights = {}, (*HEAD, *POOLING)
        if task_cls is not None:
            has_task = source.task and source.task.task_name == task_cls.task_name
            own = source if has_task else source.without_task()
            task_config, new_weights = task_cls.config_from(own, of_task, config)
            replaced = {*given} - {*of_task}
            task_config = {k: v for k, v in task_config.items() if k not in replaced}
        weights = source.weights(new_weights)
    return Blueprint(backbone, config, task_cls, task_config, weights, source.name)


def _backbone_class(source, cls):
    """Returns the backbone class that a required model class implies."""
    wanted = cls.backbone_cls if registry.is_task(cls) else cls
    if wanted is None or issubclass(source.backbone, wanted):
        return source.backbone
    if issubclass(wanted, source.backbone):
        return wanted
    raise ValueError(
        f"Expected a source of a {wanted.__name__} for {cls.__name__}; received: "
        f"{source.name!r} of a {source.backbone.__name__}"
    )


def _task_class(source, backbone, task, cls, has_classes):
    """Returns the task class, or None for a backbone."""
    if cls is not None:
        return _closest_task(source, backbone, cls) if registry.is_task(cls) else None
    if task == BACKBONE:
        return None
    if task is not None:
        return _first_task(source, backbone, lambda x: x.task_name == task, task)
    if has_classes:
        return _first_task(source, backbone, _takes_classes, "num_classes")
    return source.task if source.is_trained else None


def _closest_task(source, backbone, cls):
    """Returns the source's own task if it is a subclass of `cls`, else `cls`."""
    if source.task is not None and issubclass(source.task, cls):
        return source.task
    if cls.backbone_cls is not None:
        return cls
    return _first_task(source, backbone, lambda x: issubclass(x, cls), cls.__name__)


def _first_task(source, backbone, matches, label):
    if source.task is not None and matches(source.task):
        return source.task
    task = registry.task_class(backbone, matches)
    if task is None:
        raise ValueError(
            f"Expected a task that is registered for {backbone.__name__}; received: "
            f"{label}"
        )
    return task


def _takes_classes(cls):
    return "num_classes" in argument_names(cls)


def build(
    source: Any,
    overrides: dict[str, Any] | None = None,
    load_weights: bool = True,
    **options,
) -> Any:
    """Builds a model from a source that is not itself a model of this library."""
    if isinstance(source, keras.Model) and not is_convertible(source):
        raise ValueError(
            f"Expected the name of a preset; received: {source!r}. {HUB_MODELS}"
        )
    with resolve(source, overrides, load_weights=load_weights, **options) as blueprint:
        model = blueprint.build()
    if load_weights and blueprint.weights is None:
        _warn_of_random_weights(blueprint.name)
    return model


def _warn_of_random_weights(name):
    """Says once that a preset is an architecture only."""
    global _has_warned_of_random_weights
    if not _has_warned_of_random_weights:
        _has_warned_of_random_weights = True
        warnings.warn(
            f"{name!r} is an architecture, so the model's weights are random. Trained "
            "ones: keras_moe.models.list_presets(trained=True), and handles such as "
            "hf://timm/... and hf://openai/... (docs/weights.md). load_weights=False "
            "asks for random weights and silences this.",
            # Point to the caller of `from_preset`.
            stacklevel=4,
        )
