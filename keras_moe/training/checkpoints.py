"""Checkpoints: folders that are there as a whole, or not at all.

A checkpoint is a folder `step-00000120` with

- `arrays-00000-of-00001.safetensors` of each process: its pieces of the variables;
- `state.json`: what is no array;
- `manifest.json`: the SHA-256 of each of these files, and of itself.

It is written to `.writing-step-00000120`, brought to the disk, read again, and renamed.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.files import (
    is_plain_file,
    replace_folder,
    sha256_of,
    sync_folder,
    write_text,
)
from keras_moe.processes import process_shard
from keras_moe.training.tensor_file import (
    NonFiniteValues,
    Tensor,
    TensorFile,
    write_tensors,
)

FORMAT = 1
_WRITING = ".writing-"
# The entries of the files, and the kinds that JSON has for them.
_MANIFEST = {"format": int, "step": int, "files": dict, "sha256": str}
_STATE = {"state": dict, "variables": dict}
# Seconds in which the other processes must have written their files.
_PATIENCE = 600


class Checkpoint(NamedTuple):
    """A checkpoint whose files are what was written.

    Attributes:
        path: its folder.
        step: how many steps were made before it.
        state: what is no array, see `save_checkpoint`.
        variables: by group, the path, shape and dtype of each variable.
        files: the names of its files.
    """

    path: Path
    step: int
    state: dict
    variables: dict[str, list[dict]]
    files: tuple[str, ...]


def save_checkpoint(
    folder: str | os.PathLike,
    step: int,
    groups: dict[str, Sequence[keras.Variable]],
    state: dict,
    keep: int = 3,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
) -> Path:
    """Writes a checkpoint, and removes older ones once it is on the disk.

    Variables are written one by one. Where they lie on several devices, each process
    writes the pieces that it has, and no process has a whole one; all processes must
    call this, and see the same folder.

    Args:
        folder: of all checkpoints of a run.
        step: how many steps were made.
        groups: variables in the order in which they will be restored, such as
            `{"model": model.variables, "optimizer": model.optimizer.variables}`.
        state: further state, JSON.
        keep: how many checkpoints stay.
        keep_every: those of steps that this divides stay, too.
        keep_steps: those of these steps stay, too.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteValues: a ValueError, if a value is not finite.
        ValueError: if the state is not JSON.
        OSError: if it cannot be written. Nothing is left of it then, and the
            checkpoints before are as they were.

    Example:

    >>> import tempfile
    >>> import keras
    >>> from keras_moe.training import find_checkpoint, restore_checkpoint
    >>> from keras_moe.training import save_checkpoint
    >>> folder, weight = tempfile.mkdtemp(), keras.Variable([1.0, 2.0])
    >>> path = save_checkpoint(folder, 7, {"model": [weight]}, {"note": "good"})
    >>> changed = weight.assign([0.0, 0.0])
    >>> found = find_checkpoint(folder)
    >>> restore_checkpoint(found, {"model": [weight]})
    >>> found.step, found.state["note"], float(weight[1])
    (7, 'good', 2.0)
    """
    folder = Path(folder)
    step = check_integer("step", step, minimum=0)
    keep = check_integer("keep", keep)
    if keep_every is not None:
        check_integer("keep_every", keep_every)
    number, count = process_shard()
    final = folder / f"step-{step:08d}"
    writing = folder / f"{_WRITING}{final.name}"
    try:
        writing.mkdir(parents=True, exist_ok=True)
        _write_arrays(writing, groups, number, count)
        if number == 0:
            files = _files_of_all(writing, count)
            described = {
                group: [
                    {"path": v.path, "shape": list(v.shape), "dtype": str(v.dtype)}
                    for v in variables
                ]
                for group, variables in groups.items()
            }
            # Figures, unlike weights, may be NaN.
            text = json.dumps({"state": state, "variables": described}, sort_keys=True)
            files["state.json"] = _write(writing / "state.json", text)
            body = {"format": FORMAT, "step": step, "files": files}
            body["sha256"] = _digest_of(body)
            # The last: without it there is no checkpoint.
            _write(writing / "manifest.json", _json(body))
            _commit(writing, final)
    except BaseException as error:
        if number == 0:
            shutil.rmtree(writing, ignore_errors=True)
        else:
            _tell_failure(writing, number, count, error)
        raise
    if number == 0:
        try:
            _remove_older(folder, final, keep, keep_every, keep_steps)
        except OSError as error:
            # The new one is whole all the same.
            warnings.warn(
                f"Older checkpoints could not be removed: {error}", stacklevel=2
            )
    return final


def find_checkpoint(folder: str | os.PathLike) -> Checkpoint | None:
    """The newest checkpoint that is whole.

    Args:
        folder: of a run.

    Returns:
        The checkpoint, or None if there never was any. A warning names newer ones whose
        files are missing or are not what was written.

    Raises:
        ValueError: if there are checkpoints, and none is whole.

    Example: see `save_checkpoint`.
    """
    corrupt = []
    for path in reversed(list_checkpoints(folder)):
        try:
            found = _verified(path)
        except (OSError, RecursionError, ValueError) as error:
            corrupt.append(f"{path} ({error})")
            continue
        if corrupt:
            warnings.warn(
                f"Corrupt checkpoints are skipped: {'; '.join(corrupt)}. "
                f"{path} is whole, and is used",
                stacklevel=2,
            )
        return found
    if corrupt:
        raise ValueError(
            "Expected at least one checkpoint that is whole; received: "
            f"{'; '.join(corrupt)}. Remove them to begin anew"
        )
    return None


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """One checkpoint, if it is whole.

    Args:
        path: its folder.

    Raises:
        ValueError: if there is none, or its files are not what was written.

    Example: see `save_checkpoint`.
    """
    try:
        return _verified(Path(path))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(
            f"Expected a checkpoint that is whole; received: {path} ({error})"
        ) from error


def list_checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The folders of a run's checkpoints, oldest first; they are not looked into.

    Args:
        folder: of the run.

    Example:

    >>> from keras_moe.training import list_checkpoints
    >>> list_checkpoints("nowhere")
    []
    """
    pattern = re.compile(r"step-\d{8,}")
    found = [x for x in Path(folder).glob("step-*") if pattern.fullmatch(x.name)]
    return sorted(found, key=_step_of)


def restore_checkpoint(
    checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
) -> None:
    """Gives variables the values of a checkpoint.

    They may lie on other devices, or other numbers of devices, than those that were
    saved; each process reads the pieces that it needs.

    Args:
        checkpoint: of `find_checkpoint`.
        groups: the groups to restore, their variables in the order of saving. There may
            be fewer groups than were saved.

    Raises:
        ValueError: if a group is not there, or variables differ in number or shape.

    Example: see `save_checkpoint`.
    """
    for group, variables in groups.items():
        saved = checkpoint.variables.get(group)
        if saved is None or len(saved) != len(variables):
            raise ValueError(
                f"Expected {len(variables)} variables of {group!r} in "
                f"{checkpoint.path}; received: {saved and len(saved)}"
            )
        for entry, variable in zip(saved, variables):
            same = tuple(entry["shape"]) == tuple(variable.shape)
            same = same and _kind(entry["dtype"]) == _kind(variable.dtype)
            if group == "model":
                # What Keras names "variable" has no name.
                names = {_name(entry["path"]), _name(variable.path)} - {"variable"}
                same = same and len(names) < 2
            if not same:
                raise ValueError(
                    f"Expected shape {tuple(variable.shape)} and {variable.dtype} of "
                    f"{variable.path} in {checkpoint.path}; received: {entry}"
                )
    pieces = {}
    # Not what else lies there.
    names = sorted(x for x in checkpoint.files if x.endswith(".safetensors"))
    for path in (checkpoint.path / name for name in names):
        file = TensorFile(path)
        for name, shape in file.shapes.items():
            group, index, rest = name.split("/", 2)
            start = tuple(int(x) for x in rest.rpartition("@")[2].split(",") if x)
            pieces.setdefault((group, int(index)), []).append(
                (start, shape, file, name)
            )
    for group, variables in groups.items():
        for index, variable in enumerate(variables):
            _assign(variable, pieces[group, index])


def _kind(dtype):
    return "float" in keras.backend.standardize_dtype(dtype)


def _name(path):
    # Keras numbers layers, and what has no name, anew in each process.
    return path.rpartition("/")[2].rstrip("0123456789").rstrip("_")


def clean_checkpoints(folder: str | os.PathLike, everything: bool = False) -> None:
    """Removes what writing left behind that never came to its end.

    Args:
        folder: of a run, in which nothing is being written.
        everything: whether to remove all checkpoints, too.

    Example:

    >>> from keras_moe.training import clean_checkpoints
    >>> clean_checkpoints("nowhere")
    """
    if process_shard()[0]:
        return
    for path in Path(folder).glob(f"{_WRITING}*"):
        replaced = path.name.removeprefix(f"{_WRITING}replaced-")
        if replaced != path.name and not path.with_name(replaced).exists():
            # Ended before the new one was in its place.
            os.rename(path, path.with_name(replaced))
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if everything:
        for path in list_checkpoints(folder):
            _remove(path)


# Writing


def _write_arrays(writing, groups, number, count):
    name = f"arrays-{number:05d}-of-{count:05d}.safetensors"
    told = writing / f"{name}.json"
    told.unlink(missing_ok=True)
    tensors = [
        tensor
        for group, variables in groups.items()
        for index, variable in enumerate(variables)
        for tensor in _pieces(f"{group}/{index:05d}/{variable.path}", variable)
    ]
    sha256 = write_tensors(writing / name, tensors)
    if sha256_of(writing / name) != sha256:
        raise OSError(f"What is read from {writing / name} is not what was written")
    entry = {"sha256": sha256, "bytes": (writing / name).stat().st_size}
    # Not durable: the first process removes it, and renames the folder, at once.
    write_text(told, json.dumps({name: entry}), durable=False)


def _pieces(name, variable):
    """The pieces of a variable that this process is to write."""
    value = variable.value
    shards = getattr(value, "addressable_shards", None)
    if shards is None:

        def whole():
            return keras.ops.convert_to_numpy(variable.value)

        start = ",".join("0" * len(variable.shape))
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return [Tensor(f"{name}@{start}", tuple(variable.shape), dtype, whole)]
    tensors = []
    for shard in shards:
        # Of copies on several devices, one is written.
        if shard.replica_id == 0:
            start = ",".join(str(part.start or 0) for part in shard.index)
            tensors.append(
                Tensor(
                    f"{name}@{start}",
                    shard.data.shape,
                    str(shard.data.dtype),
                    lambda shard=shard: np.asarray(shard.data),
                )
            )
    return tensors


def _files_of_all(writing, count):
    """The files' entries in the manifest, when every process has written its own."""
    patience = time.monotonic() + _PATIENCE
    while True:
        told = list(writing.glob("*.safetensors.json"))
        if len(told) == count:
            break
        if time.monotonic() > patience:
            raise OSError(
                f"Expected files of {count} processes in {writing} after "
                f"{_PATIENCE} s; received: {len(told)}"
            )
        time.sleep(0.05)
    files = {}
    for path in told:
        files.update(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    if failed := [f"{name}: {x['error']}" for name, x in files.items() if "error" in x]:
        finite = all(x.get("finite", True) for x in files.values())
        raise (OSError if finite else NonFiniteValues)("; ".join(failed))
    return files


def _tell_failure(writing, number, count, error):
    """So that the first process does not wait for this one."""
    name = f"arrays-{number:05d}-of-{count:05d}.safetensors"
    finite = not isinstance(error, NonFiniteValues)
    told = {name: {"error": str(error), "finite": finite}}
    # A full disk takes no message either: the first process waits in vain, and says so.
    with contextlib.suppress(OSError):
        write_text(writing / f"{name}.json", json.dumps(told), durable=False)


def _write(path, text):
    write_text(path, text)
    data = text.encode()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _commit(writing, final):
    sync_folder(writing)
    # The one in its place is corrupt, or of the same step.
    aside = final.with_name(f"{_WRITING}replaced-{final.name}")
    replace_folder(writing, final, aside)


def _remove_older(folder, newest, keep, keep_every, keep_steps):
    step = _step_of(newest)
    for path in list_checkpoints(folder):
        # Newer ones are corrupt: the run went on from before them.
        if _step_of(path) > step:
            _remove(path)
    for path in list_checkpoints(folder)[:-keep]:
        number = _step_of(path)
        if number not in keep_steps and (keep_every is None or number % keep_every):
            _remove(path)


def _step_of(path):
    return int(path.name.removeprefix("step-"))


def _remove(path):
    """At once: half a checkpoint must not be seen."""
    aside = path.with_name(f"{_WRITING}removed-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)


# Reading


def _verified(path) -> Checkpoint:
    _check_plain_file(path, "manifest.json")
    manifest = _read_object(path / "manifest.json", _MANIFEST)
    said = manifest.pop("sha256")
    if _digest_of(manifest) != said:
        raise ValueError("manifest.json is not what was written")
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not known")
    # One that was copied to another name would stand in for a step of its run.
    if path.name.startswith("step-") and path.name != f"step-{manifest['step']:08d}":
        raise ValueError(f"manifest.json is of step {manifest['step']}")
    if "state.json" not in manifest["files"]:
        raise ValueError("manifest.json names no state.json")
    for name, entry in manifest["files"].items():
        _check_plain_file(path, name)
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= set(entry):
            raise ValueError(f"manifest.json has no bytes and sha256 of {name}")
        size = (path / name).stat().st_size
        if size != entry["bytes"] or sha256_of(path / name) != entry["sha256"]:
            raise ValueError(f"{name} is not what was written")
    stored = _read_object(path / "state.json", _STATE)
    for group, variables in stored["variables"].items():
        if not _are_variables(variables):
            raise ValueError(f"state.json has no list of the variables of {group!r}")
    return Checkpoint(
        path,
        manifest["step"],
        stored["state"],
        stored["variables"],
        tuple(manifest["files"]),
    )


def _read_object(path, kinds):
    """A JSON object whose entries are of the kinds that are given by their names."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    received = (
        {name: type(found[name]).__name__ if name in found else None for name in kinds}
        if isinstance(found, dict)
        else type(found).__name__
    )
    expected = {name: kind.__name__ for name, kind in kinds.items()}
    if received != expected:
        raise ValueError(f"{path.name} has not {expected}; received: {received}")
    return found


def _are_variables(entries):
    return isinstance(entries, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("path"), str)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        for entry in entries
    )


def _check_plain_file(path, name):
    """Refuses names that lead out of a checkpoint: whoever wrote it may be unknown."""
    if not is_plain_file(path, name):
        raise ValueError(
            f"expected a file in the folder itself, and no link; received: {name!r}"
        )


def _assign(variable, pieces):
    value = variable.value

    def read(index):
        bounds = [part.indices(size) for part, size in zip(index, variable.shape)]
        return _region(pieces, [(start, stop) for start, stop, _ in bounds])

    if hasattr(value, "addressable_shards"):
        from keras_moe.ops.kernels.sharded_arrays_jax import place_like

        variable.assign(place_like(value, read))
    else:
        variable.assign(np.array(read((slice(None),) * len(variable.shape))))


def _region(pieces, bounds):
    """A part of a variable, of the pieces that have something of it."""
    made = np.empty([b - a for a, b in bounds], pieces[0][2].read(pieces[0][3]).dtype)
    filled = 0
    for start, shape, file, name in pieces:
        low = [max(a, b) for a, (b, _) in zip(start, bounds)]
        high = [min(a + n, b) for a, n, (_, b) in zip(start, shape, bounds)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))
        there = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(low, high, bounds))
        made[there] = file.read(name)[here]
        filled += made[there].size
    if filled != made.size:
        raise ValueError(f"Expected all of {pieces[0][3]}; received: pieces of it")
    return made


def _digest_of(value):
    return hashlib.sha256(_json(value).encode()).hexdigest()


def _json(value):
    return json.dumps(value, sort_keys=True, allow_nan=False)
