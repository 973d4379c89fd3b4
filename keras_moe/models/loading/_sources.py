"""Sources of models: a preset, a folder or handle, or published weights.

A source offers a backbone's class and config, a task with its config, and weights.
"""

import copy
import os
from typing import Any, NamedTuple

import keras

from keras_moe._checks import argument_names, unfit
from keras_moe.models import registry
from keras_moe.models._remote import check_file_exists, load_json
from keras_moe.models.conversion import PublishedWeights, is_convertible, open_source
from keras_moe.models.saving._preset_folder import HUB_MODELS, check_preset, explained
from keras_moe.models.saving._weights_file import SavedWeights

TASK = "task.json"
ARCHITECTURE, SAVED, PUBLISHED = "architecture", "saved", "published"
BACKBONE = "backbone"
# Towers of image-text models, by the kinds of their inputs.
TOWERS = ("image", "text")
# Arguments of trained tasks that follow from the data.
_OF_DATA = ("num_classes", "preprocessor", "image_preprocessor")

Weights = SavedWeights | PublishedWeights


class TaskConfig(NamedTuple):
    """Task arguments without backbone, and path prefixes of weights to be left new."""

    config: dict[str, Any]
    new_weights: tuple[str, ...] = ()


class ModelSource:
    """A model as described by its source, before overrides."""

    kind: str
    must_fit = False
    is_trained = False
    class_names = None

    def __init__(self, name: str, backbone: type, config: dict[str, Any]):
        self.name, self.backbone, self.config = name, backbone, config
        self.task = registry.task_class(backbone)

    def task_config(self) -> dict[str, Any]:
        """Task arguments; "preprocessor" is included if set or explicitly None."""
        return {}

    def for_task(self, cls: type) -> "ModelSource":
        """Returns the source as a task sees it: without one of another kind."""
        if self.task is not None and self.task.task_name == cls.task_name:
            return self
        other = copy.copy(self)
        other.task, other.is_trained, other.class_names = None, False, None
        return other

    def weights(self, new_weights: tuple[str, ...] = ()) -> Weights | None:
        return None

    def classes(
        self, task: str | None, cls: type | None, has_classes: bool
    ) -> tuple[type, type | None]:
        """The classes of backbone and task that a task's name or a class asks for."""
        backbone, is_task = self.backbone, cls is not None and registry.is_task(cls)
        wanted = getattr(cls, "backbone_cls", None) if is_task else cls
        if wanted is not None and not issubclass(backbone, wanted):
            if cls is not None and not issubclass(wanted, backbone):
                expected = f"a source of a {wanted.__name__} for {cls.__name__}"
                raise unfit(expected, f"{self.name!r} of a {backbone.__name__}")
            backbone = wanted
        if task == BACKBONE or (cls is not None and not is_task):
            return backbone, None
        matches, label = takes_classes, "num_classes"
        if cls is not None:
            own = self.task is not None and issubclass(self.task, cls)
            if not own and wanted is not None:
                return backbone, cls
            matches, label = (lambda each: issubclass(each, cls)), cls.__name__
        elif task is not None:
            matches, label = (lambda each: each.task_name == task), task
        elif not has_classes:
            return backbone, self.task if self.is_trained else None
        if self.task is not None and matches(self.task):
            return backbone, self.task
        found = registry.task_class(backbone, matches)
        if found is None:
            raise unfit(f"a task that is registered for {backbone.__name__}", label)
        return backbone, found


class _Architecture(ModelSource):
    kind = ARCHITECTURE

    def __init__(self, name, preset):
        backbone = registry.backbone_class(preset["backbone"])
        super().__init__(name, backbone, preset["config"])
        self._task_config = preset["task_config"]
        self.class_names = preset["class_names"]
        if preset["task"] is not None:
            self.task = registry.named_task_class(preset["task"])
        # The task of a trained preset is the same without its weights.
        folder, self._saved = preset["weights"], None
        if folder is not None and os.path.isdir(folder):
            self._saved = _Saved(folder, False, name)
            self.is_trained = self._saved.is_trained
            self.task = self._saved.task or self.task
        elif folder is not None and preset["task"] is not None:
            # Missing weights, of a task that has no head to be known.
            self.is_trained = not self.task.has_head

    def task_config(self):
        if self.task is None:
            return {}
        saved = {} if self._saved is None else self._saved.task_config()
        saved = {name: saved[name] for name in _OF_DATA if name in saved}
        return {**saved, **self._task_config}


class _Saved(ModelSource):
    kind = SAVED

    def __init__(self, preset, load_weights, name=None):
        self._path, self._load_weights = check_preset(preset), load_weights
        self.must_fit = load_weights
        with explained(self._path):
            name = os.fspath(preset) if name is None else name
            super().__init__(name, *self._saved_backbone())
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

    def weights(self, new_weights=()):
        has_head = self.is_trained and not new_weights
        return SavedWeights(self._path, has_head, self._load_weights, self.name)


def _registered_class(content):
    return keras.saving.get_registered_object(str(content.get("registered_name")))


class _Published(ModelSource):
    kind = PUBLISHED
    must_fit = True

    def __init__(self, source, overrides, load_weights, tower):
        file, spec = open_source(source, overrides, load_weights, tower)
        self._file, self._spec, self._load_weights = file, spec, load_weights
        is_path = isinstance(source, (str, os.PathLike))
        name = os.fspath(source) if is_path else file.path
        arguments = spec.model_arguments()
        super().__init__(name, registry.backbone_class(spec.backbone), arguments)
        self.is_trained = spec.task_arguments is not None
        if spec.task is not None:
            self.task = registry.named_task_class(spec.task)

    def task_config(self):
        config = (self._spec.task_arguments or {}) if self.task else {}
        return {**config, **self._spec.preprocessors()}

    def weights(self, new_weights=()):
        return PublishedWeights(
            self.name, self._file, self._spec, new_weights, self._load_weights
        )


def open_model_source(
    source: object,
    overrides: dict[str, Any],
    load_weights: bool = True,
    counts_only: bool = False,
    tower: str | None = None,
) -> ModelSource:
    """Opens the source of a model."""
    preset = registry.preset(source)
    if preset is not None and preset["weights"] is not None and load_weights:
        if preset["package"] is not None and not os.path.isdir(preset["weights"]):
            raise ValueError(
                f"Expected the package {preset['package']}, which has the weights "
                f"({preset['license']}), or load_weights=False; received: {source!r}"
            )
        return _Saved(preset["weights"], load_weights, source)
    if preset is not None:
        return _Architecture(source, preset)
    if is_convertible(source):
        return _Published(source, overrides, load_weights and not counts_only, tower)
    return _Saved(source, load_weights)


def tower_of(task: str | None, cls: type | None, has_classes: bool) -> str | None:
    """Returns the tower that a class or a task implies, or None."""
    backbone = cls
    if cls is not None and registry.is_task(cls):
        backbone, has_classes = cls.backbone_cls, has_classes or takes_classes(cls)
    if task not in (None, BACKBONE):
        backbone = registry.first_task(task).backbone_cls
    if has_classes:
        return TOWERS[0]
    example = getattr(backbone, "example", None)
    return example if example in TOWERS else None


def takes_classes(cls: type) -> bool:
    return "num_classes" in argument_names(cls)
