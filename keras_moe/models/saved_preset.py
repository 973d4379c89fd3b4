"""Presets in folders and behind handles: their configs and their weights.

The files are KerasHub's, and so are the functions that find and download them.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_moe.checks import check_path, nearest
from keras_moe.compat import check_file_exists, get_file, load_json
from keras_moe.models import registry
from keras_moe.models.preset_folder import INDEX, check_folder, compare_preset, readable

_WEIGHTS, _TASK, _TASK_WEIGHTS = "model.weights.h5", "task.json", "task.weights.h5"

HUB_MODELS = (
    "KerasHub's ViT, CLIP and SigLIP become models of this library, see "
    "keras_moe.models.convert; its other backbones do not"
)


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


# The remedy where arguments other than the saved ones do not fit the weights.
_ADVICE = "load_weights=False makes a model of these arguments with initial weights"


def read_preset(preset: str | os.PathLike, name: str | None = None) -> SavedPreset:
    """Reads the configs of a preset, and none of its weights."""
    if name is not None and "://" not in str(preset) and not Path(preset).is_dir():
        raise ValueError(
            f"Expected the weights of preset={name!r} in {preset}; received: no such "
            f"folder. The installation is not whole; {_ADVICE}"
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
        if not check_file_exists(path, _TASK):
            return SavedPreset(path, backbone, config, None, {})
        content = load_json(path, _TASK)
        task = _registered(content)
        if task is None:
            raise ValueError(
                "Expected a task that is registered with Keras; received: "
                f"{content.get('registered_name')!r} in {path}/{_TASK}"
            )
        # Tasks of other libraries know no blueprint.
        task = task if registry.is_task(task) else None
        return SavedPreset(path, backbone, config, task, content["config"])


def _registered(content):
    """The class that a file of a preset names, or None."""
    return keras.saving.get_registered_object(str(content.get("registered_name")))


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a saved preset.

    Args:
        path: folder to read from, or handle.
        has_head: whether those of the task around the backbone are loaded, too.
        is_wanted: whether the weights are loaded; False keeps the initial ones.
        name: name of the preset in messages; None takes the path.
    """

    path: str
    has_head: bool
    is_wanted: bool = True
    name: str | None = None

    def fills_backbone(self) -> bool:
        """Whether no initial value of the backbone is kept."""
        return self.is_wanted

    def fills_head(self) -> bool:
        """Whether no initial value of the task around the backbone is kept."""
        wanted = self.is_wanted and self.has_head
        return wanted and check_file_exists(self.path, _TASK_WEIGHTS)

    def load(self, model: keras.Model, progress: Any = None) -> None:
        """Fills the weights of a model that is like the saved one."""
        if not self.is_wanted:
            return
        backbone = getattr(model, "backbone", model)
        with explained(self.path, self.name, _ADVICE):
            if self.fills_head():
                model.load_task_weights(get_file(self.path, _TASK_WEIGHTS))
            backbone.load_weights(self._backbone_file())

    def _backbone_file(self):
        if check_file_exists(self.path, _WEIGHTS):
            return get_file(self.path, _WEIGHTS)
        index = get_file(self.path, INDEX)
        weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        for files in weight_map.values():
            for name in [files] if isinstance(files, str) else files:
                get_file(self.path, name)
        return index

    def check(self) -> None:
        """Compares the weights of a folder with its checksums."""
        if self.is_wanted and "://" not in self.path:
            compare_preset(self.path)

    def explained(self) -> contextlib.AbstractContextManager:
        """Errors within name the preset."""
        return explained(self.path, self.name)

    def close(self) -> None:
        """Does nothing: no file stays open."""


def check_preset(preset: str | os.PathLike) -> str:
    """The handle, or the folder to read from."""
    if not isinstance(preset, (str, os.PathLike)):
        raise ValueError(
            f"Expected the name of a preset; received: {preset!r}. {HUB_MODELS}"
        )
    if "://" in str(preset):
        return str(preset)
    folder = readable(check_path("preset", preset))
    if not folder.is_dir():
        raise ValueError(
            "Expected a built-in preset, a folder or a handle such as hf://user/name; "
            f"received: preset={str(preset)!r} "
            f"({nearest(str(preset), list(registry.presets()))})"
        )
    for path in folder.iterdir():
        # Opening a pipe waits for a writer, which may never come.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"Expected files in a preset's folder; received: {path}")
    check_folder(folder)
    return str(folder)


@contextlib.contextmanager
def explained(preset: str, name: str | None = None, advice: str = "") -> Iterator[None]:
    """Says which preset an error comes from: Keras's own do not."""
    received = f"preset={str(name or preset)!r}"
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        if str(preset) in str(error) or received in str(error):
            raise
        raise ValueError(
            "Expected a preset whose files fit together and fit the arguments"
            f"{advice and f' ({advice})'}; received: {received}, which failed with "
            f"{type(error).__name__}: {error}"
        ) from error
