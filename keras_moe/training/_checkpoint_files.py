"""The two file formats of a checkpoint.

A single process writes a safetensors file per group, with variables named `INDEX/PATH`,
and `state.json` with the rest and each file's SHA-256. Several processes, and remote
folders, write through Orbax: an item per group and one for the state. The state has a
SHA-256 of its own in both. Every backend reads both, on any devices and any number of
processes.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from keras_moe._checks import import_extra, unfit
from keras_moe._files import (
    check_free_space,
    check_room,
    is_plain_file,
    new_partial,
    read_text,
    regular_file,
    replace_folder,
    sha256_of,
    sync_file,
    sync_folder,
    write_text,
)
from keras_moe._processes import rank_and_world_size
from keras_moe.models._remote import check_storage

STATE_FILE = "state.json"
# Orbax item that holds the state.
_STATE = "state"
# Name of a state's own SHA-256.
_DIGEST = "state_sha256"
# `pathlib` collapses the double slash of a URL.
_REMOTE = re.compile(r"(?P<scheme>[a-z][a-z0-9]+):/+(?P<rest>.*)")


def is_remote(folder: str | os.PathLike) -> bool:
    """Whether a folder is in an object store, such as `gs://bucket/run`."""
    return _REMOTE.fullmatch(os.fspath(folder)) is not None


def as_path(folder: str | os.PathLike) -> Any:
    """Returns a path object for a local or remote folder."""
    remote = _REMOTE.fullmatch(os.fspath(folder))
    if remote is None:
        return Path(folder)
    _orbax()
    from etils import epath

    return epath.Path(f"{remote['scheme']}://{remote['rest']}")


def reached_path(folder: str | os.PathLike) -> Any:
    """Returns a path object to read, or raises ConnectionError."""
    path = as_path(folder)
    if os.fspath(path).startswith("gs://"):
        check_storage(os.fspath(path))
    return path


def signed(content: dict) -> dict:
    """Returns a checkpoint's state with its own SHA-256, as JSON has it."""
    content = json.loads(json.dumps(content))
    return {**content, _DIGEST: _digest(content)}


def _digest(content):
    rest = {name: value for name, value in content.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _checked(content):
    if not isinstance(content, dict) or content.get(_DIGEST) != _digest(content):
        raise ValueError(f"expected the state that was saved, with its {_DIGEST}")
    return content


# Safetensors


def write_safetensors(path: Path, groups: dict, content: dict) -> None:
    """Writes a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = new_partial(path)
    try:
        sums = {}
        for group, variables in groups.items():
            arrays = {
                f"{index:05d}/{variable.path}": np.asarray(
                    ops.convert_to_numpy(variable.value), order="C"
                )
                for index, variable in enumerate(variables)
            }
            file = writing / f"{group}.safetensors"
            check_room(file, sum(array.nbytes for array in arrays.values()))
            try:
                save_file(arrays, file)
            except SafetensorError as error:
                raise OSError(f"{file} could not be written: {error}") from error
            sync_file(file)
            sums[file.name] = sha256_of(file)
        state = signed({**content, "sha256": sums})
        write_text(writing / STATE_FILE, json.dumps(state))
        sync_folder(writing)
        replace_folder(writing, path)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def read_safetensors(path: Path) -> dict:
    """Verifies a checkpoint's files and returns its state."""
    _check_plain_file(path, STATE_FILE)
    try:
        content = _checked(json.loads(read_text(path / STATE_FILE, path)))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{STATE_FILE} is damaged: {error}") from error
    for group in content["variables"]:
        name = f"{group}.safetensors"
        _check_plain_file(path, name)
        if sha256_of(path / name) != content["sha256"][name]:
            raise ValueError(f"{name} is damaged")
    return content


def restore_safetensors(path: Path, groups: dict, saved: dict) -> None:
    """Assigns the saved arrays to variables."""
    for group, variables in groups.items():
        file_path = path / f"{group}.safetensors"
        try:
            with safe_open(regular_file(file_path, path), framework="np") as file:
                for index, variable in enumerate(variables):
                    name = f"{index:05d}/{saved[group][index].path}"
                    variable.assign(file.get_tensor(name))
        except SafetensorError as error:
            expected = f"the variables of a checkpoint in {file_path}"
            raise unfit(expected, error) from error


def _check_plain_file(path, name):
    """Rejects names that point outside the folder: checkpoints are untrusted."""
    if not is_plain_file(path, name):
        raise ValueError(
            f"expected a file in the folder itself, and no link; received: {name!r}"
        )


# Orbax


def _orbax():
    return import_extra(
        "orbax.checkpoint",
        "Expected the package orbax-checkpoint, for checkpoints of several processes "
        "and in remote folders",
        "orbax",
    )


def _checkpointer():
    ocp = _orbax()
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def is_orbax(path: Any) -> bool:
    """Whether a folder contains a finished Orbax checkpoint."""
    return (path / "_CHECKPOINT_METADATA").exists()


def write_orbax(path: Any, groups: dict, content: dict) -> None:
    """Writes a checkpoint from all processes together."""
    ocp = _orbax()
    values = {
        group: {name: _value_to_save(x.value) for name, x in numbered}
        for group, variables in groups.items()
        if (numbered := _numbered(variables))
    }
    if not is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = [array for group in values.values() for array in group.values()]
        size = sum(array.nbytes for array in arrays)
        check_free_space(path, size // rank_and_world_size()[1])
    args = {group: ocp.args.PyTreeSave(x) for group, x in values.items()}
    args[_STATE] = ocp.args.JsonSave(signed(content))
    try:
        _checkpointer().save(_absolute(path), ocp.args.Composite(**args), force=True)
    except Exception as error:
        # TensorStore reports a full disk as a ValueError.
        raise OSError(f"{path} could not be written: {error}") from error


def read_orbax(path: Any) -> dict:
    """Returns a checkpoint's state."""
    ocp = _orbax()
    args = ocp.args.Composite(**{_STATE: ocp.args.JsonRestore()})
    try:
        return _checked(_checkpointer().restore(_absolute(path), args)[_STATE])
    except Exception as error:
        raise ValueError(f"{error}") from error


def restore_orbax(path: Any, groups: dict) -> None:
    """Assigns the saved arrays to variables."""
    ocp = _orbax()
    args = {}
    for group, variables in groups.items():
        named = {name: _restore_args(x.value) for name, x in _numbered(variables)}
        if named:
            args[group] = ocp.args.PyTreeRestore(restore_args=named)
    values = _checkpointer().restore(_absolute(path), ocp.args.Composite(**args))
    for group in args:
        for name, variable in _numbered(groups[group]):
            variable.assign(values[group][name])


def _absolute(path):
    # Orbax rejects relative paths.
    return path if is_remote(path) else path.absolute()


def _numbered(variables):
    """Numbers the variables and skips empty ones, which Orbax rejects."""
    return [(f"{i:05d}", x) for i, x in enumerate(variables) if 0 not in x.shape]


def _is_sharded(value):
    """Whether each process reads and writes its own shards of an array."""
    if not hasattr(type(value), "addressable_shards"):
        return False
    return rank_and_world_size()[1] == 1 or not value.is_fully_addressable


def _value_to_save(value):
    if not _is_sharded(value):
        return np.asarray(ops.convert_to_numpy(value))
    from keras_moe._backends.jax import with_shards

    return with_shards(value)


def _restore_args(value):
    ocp = _orbax()
    if not _is_sharded(value):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=value.sharding, global_shape=value.shape, dtype=value.dtype
    )
