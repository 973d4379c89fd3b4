"""Preset folders on disk: written whole or not at all, and checked when read."""

import contextlib
import contextvars
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import h5py
import keras

from keras_moe.files import (
    new_partial,
    remove_partials,
    replace_folder,
    sync_tree,
    write_failed,
    write_json,
)
from keras_moe.locks import locked
from keras_moe.models.weights_checksums import (
    CHECKSUMS,
    INDEX,
    METADATA,
    checksums,
    is_weights,
    shard_names,
)

# The files of a preset folder; other files in it are the user's.
PRESET_FILES = (
    "config.json",
    "metadata.json",
    "task.json",
    "preprocessor.json",
    "image_converter.json",
    INDEX,
)

# Seconds to wait for another process that saves to the same folder.
_PATIENCE = 600

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
    """A folder to write a preset to, which takes its place when all is written.

    If writing fails or is interrupted, what was at `preset_dir` stays as it was. One
    process at a time saves to a folder, and another one waits for it. The remains of
    killed processes beside it are removed. A task that is being saved writes its
    backbone to the same folder: within, another call yields its folder as it is.

    Args:
        preset_dir: folder of the preset; a new one, an empty one, or an older preset,
            whose files that are not the preset's own are kept.

    Raises:
        ValueError: if `preset_dir` is a file, or a folder of something else.
        FolderInUse: an OSError that names the process that is saving to `preset_dir`,
            if it takes more than ten minutes.
        OSError: if it cannot be written.
    """
    if _writing.get():
        yield str(preset_dir)
        return
    target = Path(preset_dir).expanduser().resolve()
    _check_target(target, preset_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.saving.lock")
    with locked(lock, f"the preset {preset_dir}", _PATIENCE):
        _recover(target)
        # Another process may have been first.
        _check_target(target, preset_dir)
        remove_partials(target)
        staging = new_partial(target)
        if target.is_dir():
            # A private folder stays private.
            staging.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU)
        token = _writing.set(True)
        try:
            yield str(staging)
            _add_checksums(staging)
            _keep_foreign(target, staging)
            sync_tree(staging)
            replace_folder(staging, target, _previous(target))
        except OSError as error:
            if error.filename is not None:
                raise
            # KerasHub's errors do not name the file that could not be written.
            size = sum(file.stat().st_size for file in staging.iterdir())
            raise write_failed(error, preset_dir, size) from error
        finally:
            _writing.reset(token)
            shutil.rmtree(staging, ignore_errors=True)


def _check_target(target, preset_dir):
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"Expected a folder; received a file: {preset_dir}")
    if any(target.iterdir()) and not is_preset(target):
        raise ValueError(
            "Expected a new folder, an empty one or an older preset, since saving "
            f"replaces the folder; received: {preset_dir}"
        )


def _add_checksums(staging):
    """Adds the weights' checksums to the metadata, if the preset has any."""
    path = staging / METADATA
    if path.is_file():
        metadata = json.loads(path.read_text(encoding="utf-8"))
        weights = [file.name for file in staging.iterdir() if is_weights(file)]
        write_json(path, {**metadata, CHECKSUMS: checksums(staging, weights)})


def _previous(target):
    return target.with_name(f".{target.name}.previous-preset")


def _recover(target):
    """Finishes a save that was killed between its two renames, or after them."""
    previous = _previous(target)
    if not previous.is_dir():
        return
    if is_preset(target):
        shutil.rmtree(previous, ignore_errors=True)
        return
    if target.is_dir():
        # It fails unless the folder is empty: the older preset is safe.
        target.rmdir()
    os.rename(previous, target)


def readable(preset_dir: str | os.PathLike) -> Path:
    """The folder to read a preset from: the old one of a preset that is being replaced.

    Reading changes nothing on disk.
    """
    target = Path(preset_dir).expanduser()
    if target.is_dir() or not target.name:
        return target
    previous = _previous(target.resolve())
    return previous if previous.is_dir() else target


def _keep_foreign(target, staging):
    if not target.is_dir():
        return
    for path in target.iterdir():
        own = path.name in PRESET_FILES or is_weights(path)
        if own or (staging / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staging / path.name, symlinks=True)
        else:
            shutil.copy2(path, staging / path.name, follow_symlinks=False)


def check_folder(folder: str | os.PathLike) -> None:
    """Checks that a local preset folder has its files, and that they are whole.

    Args:
        folder: an existing folder.

    Raises:
        ValueError: naming the file that is missing, truncated or of another kind.
    """
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
