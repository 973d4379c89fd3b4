"""Preset folders on disk: written whole or not at all, and checked when read."""

import contextlib
import contextvars
import json
import os
from collections.abc import Iterator
from pathlib import Path

import h5py
import keras

from keras_moe.models.checksums import INDEX, add_checksums, is_weights, shard_names
from keras_moe.staging import previous_folder, staged_folder

# The files of a preset folder; other files in it are the user's.
PRESET_FILES = (
    "config.json",
    "metadata.json",
    "task.json",
    "preprocessor.json",
    "image_converter.json",
    INDEX,
)

_KIND = "preset"

_writing = contextvars.ContextVar("writing", default=False)


def is_preset(folder: str | os.PathLike) -> bool:
    """Whether a folder is a Keras preset, and not another library's weights."""
    try:
        content = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    except (OSError, RecursionError, ValueError):
        return False
    return isinstance(content, dict) and "registered_name" in content


@contextlib.contextmanager
def staged(preset_dir: str | os.PathLike) -> Iterator[str]:
    """A folder to write a preset to, which takes its place when all is written."""
    if _writing.get():
        yield str(preset_dir)
        return
    with staged_folder(preset_dir, _KIND, is_preset, _is_own, add_checksums) as staging:
        token = _writing.set(True)
        try:
            yield str(staging)
        finally:
            _writing.reset(token)


def readable(preset_dir: str | os.PathLike) -> Path:
    """The folder to read a preset from: the old one of a preset that is being replaced.

    Reading changes nothing on disk.
    """
    target = Path(preset_dir).expanduser()
    if target.is_dir() or not target.name:
        return target
    previous = previous_folder(target.resolve(), _KIND)
    return previous if previous.is_dir() else target


def _is_own(path):
    return path.name in PRESET_FILES or is_weights(path)


def check_folder(folder: str | os.PathLike) -> None:
    """Checks that a local preset folder has its files, and that they are whole."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"Expected a preset folder with a config.json; received: {folder}, which "
            f"has {sorted(path.name for path in folder.iterdir())}"
        )
    for name in PRESET_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"Expected whole JSON in {path}; received: {error}. "
                "The file is truncated or of another kind."
            ) from error
        if name == INDEX:
            shard_names(path, content)
        if name in ("config.json", "task.json") and (
            not isinstance(content, dict)
            or "registered_name" not in content
            or not isinstance(content.get("config"), dict)
        ):
            raise ValueError(
                f"Expected a serialised Keras object in {path}; received a file of "
                "another kind"
            )
    weights = sorted(path for path in folder.iterdir() if is_weights(path))
    if not any(path.name.startswith("model") for path in weights):
        raise ValueError(
            f"Expected a model.weights.h5 in the preset folder {folder}; "
            f"received: {sorted(path.name for path in folder.iterdir())}"
        )
    for name, other in (
        ("task.json", "task.weights.h5"),
        ("task.weights.h5", "task.json"),
    ):
        if (folder / other).exists() and not (folder / name).exists():
            if other == "task.json" and not _has_head(folder / other):
                continue
            raise ValueError(
                f"Expected {name} beside {other} in the preset folder {folder}; "
                f"received: {sorted(path.name for path in folder.iterdir())}"
            )
    for path in weights:
        try:
            h5py.File(path, "r").close()
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"Expected a whole HDF5 file at {path}; received: {error}. "
                "The file is truncated or of another kind."
            ) from error


def _has_head(path):
    """Whether the task of a file has weights beside its backbone's."""
    name = json.loads(path.read_text(encoding="utf-8"))["registered_name"]
    return getattr(keras.saving.get_registered_object(str(name)), "has_head", True)
