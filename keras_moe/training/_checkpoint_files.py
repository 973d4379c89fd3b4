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
from keras import ops, tree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from keras_moe import _files
from keras_moe._checks import import_extra, unfit
from keras_moe._processes import rank_and_world_size, splitting_backend
from keras_moe.models._remote import check_storage

STATE_FILE = "state.json"
# Orbax item that holds the state.
_STATE = "state"
# Groups of variables that need another name as Orbax items: Orbax reserves theirs.
_ITEMS = {"metrics": "running_metrics"}
# Name of a state's own SHA-256.
_DIGEST = "state_sha256"
# `pathlib` collapses the double slash of a URL.
_REMOTE = re.compile(r"(?P<scheme>[a-z][a-z0-9]+):/+(?P<rest>.*)")


def is_remote(folder: str | os.PathLike) -> bool:
    """Whether a folder is in an object store, such as `gs://bucket/run`."""
    return _REMOTE.fullmatch(os.fspath(folder)) is not None


def as_path(folder: str | os.PathLike) -> Any:
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
    writing = _files.new_partial(path)
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
            _files.check_room(file, sum(array.nbytes for array in arrays.values()))
            try:
                save_file(arrays, file)
            except SafetensorError as error:
                raise OSError(f"{file} could not be written: {error}") from error
            _files.sync_file(file)
            sums[file.name] = _files.sha256_of(file)
        state = signed({**content, "sha256": sums})
        _files.write_text(writing / STATE_FILE, json.dumps(state))
        _files.sync_folder(writing)
        _files.replace_folder(writing, path)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def read_safetensors(path: Path) -> dict:
    """Verifies a checkpoint's files and returns its state."""
    _check_plain_file(path, STATE_FILE)
    try:
        content = _checked(json.loads(_files.read_text(path / STATE_FILE, path)))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{STATE_FILE} is damaged: {error}") from error
    for group in content["variables"]:
        name = f"{group}.safetensors"
        _check_plain_file(path, name)
        if _files.sha256_of(path / name) != content["sha256"][name]:
            raise ValueError(f"{name} is damaged")
    return content


def restore_safetensors(path: Path, groups: dict, saved: dict) -> None:
    for group, variables in groups.items():
        file_path = path / f"{group}.safetensors"
        try:
            with safe_open(
                _files.regular_file(file_path, path), framework="np"
            ) as file:
                for index, variable in enumerate(variables):
                    name = f"{index:05d}/{saved[group][index].path}"
                    variable.assign(file.get_tensor(name))
        except SafetensorError as error:
            expected = f"the variables of a checkpoint in {file_path}"
            raise unfit(expected, error) from error


def _check_plain_file(path, name):
    """Rejects names that point outside the folder: checkpoints are untrusted."""
    if not _files.is_plain_file(path, name):
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


def _format():
    """A context in which groups are trees and the state JSON, which is a tree, too."""
    context, handlers = _orbax().v1.Context(), _orbax().v1.handlers
    registry = handlers.local_registry(include_global_registry=False)
    registry.add(handlers.JsonHandler, checkpointable_name=_STATE)
    context.checkpointables.registry = registry.add(handlers.PyTreeHandler)
    return context


def is_orbax(path: Any) -> bool:
    return (path / "_CHECKPOINT_METADATA").exists()


def write_orbax(path: Any, groups: dict, content: dict) -> None:
    """Writes a checkpoint from all processes together."""
    values: Any = tree.map_structure(_value_to_save, _items(groups))
    if not is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        size = sum(array.nbytes for array in tree.flatten(values))
        _files.check_free_space(path, size // rank_and_world_size()[1])
    values[_STATE] = signed(content)
    try:
        with _format():
            _orbax().v1.save_checkpointables(_absolute(path), values, overwrite=True)
    except Exception as error:
        # TensorStore reports a full disk as a ValueError.
        raise OSError(f"{path} could not be written: {error}") from error


def read_orbax(path: Any) -> dict:
    try:
        return _checked(_load(path, {_STATE: None})[_STATE])
    except Exception as error:
        raise ValueError(f"{error}") from error


def restore_orbax(path: Any, groups: dict) -> None:
    items = _items(groups)
    # A sharded array names its own type and layout.
    wanted = tree.map_structure(
        lambda x: x.value if _is_sharded(x.value) else np.ndarray, items
    )
    for item, values in _load(path, wanted).items():
        for name, variable in items[item].items():
            variable.assign(values[name])


def _load(path, wanted):
    with _format():
        return _orbax().v1.load_checkpointables(_absolute(path), wanted)


def _absolute(path):
    # Orbax rejects relative paths.
    return path if is_remote(path) else path.absolute()


def _items(groups):
    """Numbered variables by item, without empty ones, which Orbax rejects."""
    items = {}
    for group, variables in groups.items():
        named = {f"{i:05d}": x for i, x in enumerate(variables) if 0 not in x.shape}
        if named:
            items[_ITEMS.get(group, group)] = named
    return items


def _is_sharded(value):
    """Whether each process reads and writes its own shards of an array."""
    alone = rank_and_world_size()[1] == 1
    has_shards = hasattr(type(value), "addressable_shards")
    return has_shards and (alone or not value.is_fully_addressable)


def _value_to_save(variable):
    if not _is_sharded(variable.value):
        return np.asarray(ops.convert_to_numpy(variable.value))
    return splitting_backend().with_shards(variable.value)
