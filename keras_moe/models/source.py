"""What a source offers before overrides: class, config, task and weights.

A source is a registered preset, a folder or handle that `save_to_preset` has written,
or weights that others have published.
"""

import contextlib
import copy
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import keras

from keras_moe.compat import check_file_exists, load_json
from keras_moe.models import registry
from keras_moe.models.conversion import PublishedWeights, is_convertible, open_source
from keras_moe.models.preset_folder import HUB_MODELS, check_preset, explained
from keras_moe.models.weights_file import LOAD_ANEW, SavedWeights

TASK = "task.json"
ARCHITECTURE, SAVED, PUBLISHED = "architecture", "saved", "published"


class Weights(Protocol):
    """Where a model's weights come from."""

    def fills_backbone(self) -> bool:
        """Whether `load` replaces every initial value of the backbone."""

    def fills_head(self) -> bool:
        """Whether `load` replaces every initial value of the task around it."""

    def load(self, model: keras.Model, progress: Any = None) -> Any:
        """Fills a model's weights, and returns a report or None."""

    def check(self) -> None:
        """Raises ValueError if the weights are damaged, as far as that is known."""

    def explained(self) -> contextlib.AbstractContextManager:
        """A context whose errors name the source."""

    def close(self) -> None:
        """Closes the source."""


class ModelSource:
    """The description of a model by its source, before overrides."""

    kind: str
    name: str
    label: str
    backbone: type
    config: dict[str, Any]
    task: type | None
    is_trained = False
    must_fit = False
    class_names = None

    def label_of(self, backbone: type) -> str:
        """Words for a source of another backbone."""
        return f"a preset of a {backbone.__name__}"

    def task_config(self) -> dict[str, Any]:
        """Arguments of the task beside its backbone.

        "preprocessor" is among them where the source has one, or says that it has none.
        """
        return {}

    def without_task(self) -> "ModelSource":
        """The same source without its own task."""
        other = copy.copy(self)
        other.task, other.is_trained, other.class_names = None, False, None
        return other

    def explained(self) -> contextlib.AbstractContextManager:
        """A context whose errors name the source, where it is needed."""
        return contextlib.nullcontext()

    def weights(self, new_weights: tuple[str, ...] = ()) -> Weights | None:
        """The weights, or None."""
        return None


class TaskConfig(NamedTuple):
    """Arguments of a task, and which of its weights the source does not fill.

    Attributes:
        config: arguments of the task beside its backbone.
        new_weights: prefixes of the paths of weights that keep their initial values.
    """

    config: dict[str, Any]
    new_weights: tuple[str, ...] = ()


class _Architecture(ModelSource):
    kind = ARCHITECTURE

    def __init__(self, name, spec):
        self.name, self._spec = name, spec
        self.backbone = registry.backbone_class(spec["backbone"])
        self.label = f"preset={name!r} of {self.backbone.__name__}"
        self.config = spec["config"]
        task = spec["task"]
        self.task = registry.task_class(self.backbone)
        if task is not None:
            self.task = registry.named_task_class(task)
        self.class_names = spec["class_names"]

    def task_config(self):
        return {} if self.task is None else self._spec["task_config"]


class _Saved(ModelSource):
    kind = SAVED

    def __init__(self, preset, load_weights, name=None):
        self._preset, self._load_weights = read_preset(preset, name), load_weights
        self.name = os.fspath(preset) if name is None else name
        self.backbone, self.config = self._preset.backbone, self._preset.config
        self.label = f"preset={self.name!r} of {self.backbone.__name__}"
        self.task = self._preset.task or registry.task_class(self.backbone)
        self.is_trained = self._preset.task is not None
        self.must_fit = load_weights

    def task_config(self):
        return self._preset.task_config() if self.is_trained else {}

    def explained(self):
        return explained(self._preset.path, self.name)

    def weights(self, new_weights=()):
        has_head = self.is_trained and not new_weights
        return SavedWeights(self._preset.path, has_head, self._load_weights, self.name)


class _Published(ModelSource):
    kind = PUBLISHED
    must_fit = True

    def __init__(self, source, overrides, load_weights, tower):
        opened = open_source(source, overrides, load_weights, tower)
        self._file, self._spec = opened
        self._load_weights = load_weights
        is_path = isinstance(source, (str, os.PathLike))
        self.name = os.fspath(source) if is_path else self._file.path
        self.backbone = registry.backbone_class(self._spec.backbone)
        self.config = self._spec.arguments
        self.label = (
            f"those of a {self.backbone.__name__}, by the names of {self._spec.scheme}"
        )
        self.task = registry.task_class(self.backbone)
        self.is_trained = self._spec.task_arguments is not None

    def label_of(self, backbone):
        return f"weights of a {backbone.__name__}"

    def task_config(self):
        config = (self._spec.task_arguments or {}) if self.task else {}
        return {**config, "preprocessor": self._spec.preprocessor()}

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
        return _Saved(spec["weights"], load_weights, source)
    if spec is not None:
        return _Architecture(source, spec)
    if is_convertible(source):
        return _Published(source, overrides, load_weights and not counts_only, tower)
    return _Saved(source, load_weights)


class SavedPreset(NamedTuple):
    """The configs of a saved preset.

    Attributes:
        path: folder to read from, or handle.
        backbone: class of the backbone.
        config: arguments of the backbone.
        task: class of the saved task, or None.
        saved_task: arguments of the task, as they were saved.
    """

    path: str
    backbone: type
    config: dict[str, Any]
    task: type | None
    saved_task: dict[str, Any]

    def task_config(self) -> dict[str, Any]:
        """Arguments of the task beside its backbone, with its preprocessor made."""
        config = {k: v for k, v in self.saved_task.items() if k != "backbone"}
        if isinstance(config.get("preprocessor"), dict):
            with explained(self.path):
                preprocessor = keras.saving.deserialize_keras_object(
                    config["preprocessor"]
                )
                if hasattr(preprocessor, "load_preset_assets"):
                    # Such as a tokenizer's vocabulary.
                    preprocessor.load_preset_assets(self.path)
            config["preprocessor"] = preprocessor
        return config


def read_preset(preset: str | os.PathLike, name: str | None = None) -> SavedPreset:
    """Reads the configs of a preset, and none of its weights."""
    if name is not None and "://" not in str(preset) and not Path(preset).is_dir():
        raise ValueError(
            f"Expected the weights of preset={name!r} in {preset}; received: no such "
            f"folder. The installation is not whole; {LOAD_ANEW}"
        )
    path = check_preset(preset)
    with explained(path):
        content = load_json(path)
        backbone = _registered(content)
        if backbone is None or not registry.is_registered(backbone):
            raise ValueError(
                "Expected a preset of a registered backbone, one of "
                f"{registry.backbone_names()}; received: "
                f"{content.get('registered_name')!r} in {path}. {HUB_MODELS}"
            )
        config = content["config"]
        if not check_file_exists(path, TASK):
            return SavedPreset(path, backbone, config, None, {})
        content = load_json(path, TASK)
        task = _registered(content)
        if task is None:
            raise ValueError(
                "Expected a task that is registered with Keras; received: "
                f"{content.get('registered_name')!r} in {path}/{TASK}"
            )
        # Tasks of other libraries know no blueprint.
        task = task if registry.is_task(task) else None
        return SavedPreset(path, backbone, config, task, content["config"])


def _registered(content):
    """The class that a file of a preset names, or None."""
    return keras.saving.get_registered_object(str(content.get("registered_name")))
