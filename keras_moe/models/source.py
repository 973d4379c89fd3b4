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
        if name is not None and "://" not in str(preset) and not Path(preset).is_dir():
            raise ValueError(
                f"Expected the weights of preset={name!r} in {preset}; received: no "
                f"such folder. The installation is incomplete; {LOAD_ANEW}"
            )
        self.name = os.fspath(preset) if name is None else name
        self._path, self._load_weights = check_preset(preset), load_weights
        self.must_fit = load_weights
        with explained(self._path):
            self.backbone, self.config = self._saved_backbone()
            task, self._saved_task = self._read_task()
        self.is_trained = task is not None
        self.task = task or registry.task_class(self.backbone)
        self.label = f"preset={self.name!r} of {self.backbone.__name__}"

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
        """The class of the saved task, or None, and its arguments."""
        if not check_file_exists(self._path, TASK):
            return None, {}
        content = load_json(self._path, TASK)
        task = _registered_class(content)
        if task is None:
            raise ValueError(
                "Expected a task that is registered with Keras; received: "
                f"{content.get('registered_name')!r} in {self._path}/{TASK}"
            )
        # Tasks of other libraries know no blueprint.
        return (task if registry.is_task(task) else None), content["config"]

    def task_config(self):
        if not self.is_trained:
            return {}
        config = {k: v for k, v in self._saved_task.items() if k != "backbone"}
        if isinstance(config.get("preprocessor"), dict):
            with explained(self._path):
                preprocessor = keras.saving.deserialize_keras_object(
                    config["preprocessor"]
                )
                if hasattr(preprocessor, "load_preset_assets"):
                    # Such as a tokenizer's vocabulary.
                    preprocessor.load_preset_assets(self._path)
            config["preprocessor"] = preprocessor
        return config

    def explained(self):
        return explained(self._path, self.name)

    def weights(self, new_weights=()):
        has_head = self.is_trained and not new_weights
        return SavedWeights(self._path, has_head, self._load_weights, self.name)


def _registered_class(content):
    """The class that a file of a preset names, or None."""
    return keras.saving.get_registered_object(str(content.get("registered_name")))


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
