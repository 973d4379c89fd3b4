"""Checkpoints on a local or shared disk, which any backend and any layout reads.

Beside `manifest.json`, the SHA-256 of each file and of itself, a checkpoint has

- `arrays-00000-of-00001.safetensors` of each process: its pieces of the variables;
- `state.json`: what is no array.

It is written to `.writing-step-00000120`, brought to the disk, read again, and renamed.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import keras

from keras_moe.files import (
    is_plain_file,
    remove_folder,
    replace_folder,
    sha256_of,
    sync_folder,
    write_text,
)
from keras_moe.processes import process_shard
from keras_moe.training import manifest
from keras_moe.training.array_pieces import (
    assign_pieces,
    opened_pieces,
    pieces_to_write,
)
from keras_moe.training.storage import Checkpoint, Storage
from keras_moe.training.tensor_writer import NonFiniteValues, write_tensors

_WRITING = ".writing-"
# Seconds in which the other processes must have written their files.
_PATIENCE = 600


class LocalStorage(Storage):
    """Checkpoints as safetensors and JSON: nothing that is read can run code.

    Variables are written one by one. Where they lie on several devices, each process
    writes the pieces that it has, and no process has a whole one; all processes see
    the same folder.

    Args:
        folder: folder of all checkpoints of a run.

    Example:

    >>> import tempfile
    >>> import keras
    >>> from keras_moe.training import LocalStorage
    >>> storage, weight = LocalStorage(tempfile.mkdtemp()), keras.Variable([1.0, 2.0])
    >>> path = storage.save(7, {"model": [weight]}, {"note": "good"})
    >>> changed = weight.assign([0.0, 0.0])
    >>> checkpoint = storage.newest()
    >>> storage.restore(checkpoint, {"model": [weight]})
    >>> checkpoint.step, checkpoint.state["note"], float(weight[1])
    (7, 'good', 2.0)
    """

    @staticmethod
    def as_path(folder: str | os.PathLike) -> Path:
        return Path(folder)

    @property
    def writes_alone(self) -> bool:
        return process_shard()[0] == 0

    def write(
        self,
        path: Path,
        step: int,
        groups: dict[str, Sequence[keras.Variable]],
        text: str,
    ) -> None:
        number, count = process_shard()
        writing = self.folder / f"{_WRITING}{path.name}"
        try:
            writing.mkdir(parents=True, exist_ok=True)
            _write_arrays(writing, groups, number, count)
            if number == 0:
                files = _files_of_all(writing, count)
                files[manifest.STATE] = _write(writing / manifest.STATE, text)
                # The last: without it there is no checkpoint.
                _write(writing / manifest.NAME, manifest.manifest_text(step, files))
                _commit(writing, path)
        except BaseException as error:
            if number == 0:
                shutil.rmtree(writing, ignore_errors=True)
            else:
                _report_failure(writing, number, count, error)
            raise

    def verified(self, path: Path) -> Checkpoint:
        _check_plain_file(path, manifest.NAME)
        content = manifest.read_manifest(path)
        for name, entry in content["files"].items():
            _check_plain_file(path, name)
            size = (path / name).stat().st_size
            if size != entry["bytes"] or sha256_of(path / name) != entry["sha256"]:
                raise ValueError(f"{name} is not what was written")
        state, variables = manifest.read_state(path)
        files = tuple(content["files"])
        return Checkpoint(path, content["step"], state, variables, files, self)

    def assign(
        self, checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
    ) -> None:
        # Not what else lies there.
        names = sorted(x for x in checkpoint.files if x.endswith(".safetensors"))
        with opened_pieces([checkpoint.path / name for name in names]) as pieces:
            for group, variables in groups.items():
                entries = checkpoint.variables[group]
                for index, variable in enumerate(variables):
                    dtype = entries[index]["dtype"]
                    assign_pieces(variable, pieces.get((group, index), ()), dtype)

    def remove(self, path: Path) -> None:
        aside = path.with_name(f"{_WRITING}removed-{path.name}")
        remove_folder(path, aside)

    def clean(self, everything: bool = False) -> None:
        if not self.writes_alone:
            return
        for path in self.folder.glob(f"{_WRITING}*"):
            replaced = path.name.removeprefix(f"{_WRITING}replaced-")
            if replaced != path.name and not path.with_name(replaced).exists():
                # Ended before the new one was in its place.
                os.rename(path, path.with_name(replaced))
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in self.paths():
            # Folders come whole by a rename: an empty one was begun by a storage that
            # fills them in place, and was killed.
            if everything or not any(path.iterdir()):
                self.remove(path)


def _write_arrays(writing, groups, number, count):
    name = f"arrays-{number:05d}-of-{count:05d}.safetensors"
    report = writing / f"{name}.json"
    report.unlink(missing_ok=True)
    tensors = [
        tensor
        for group, variables in groups.items()
        for index, variable in enumerate(variables)
        for tensor in pieces_to_write(f"{group}/{index:05d}/{variable.path}", variable)
    ]
    sha256 = write_tensors(writing / name, tensors)
    if sha256_of(writing / name) != sha256:
        raise OSError(f"What is read from {writing / name} is not what was written")
    entry = {"sha256": sha256, "bytes": (writing / name).stat().st_size}
    # Not durable: the first process removes it, and renames the folder, at once.
    write_text(report, json.dumps({name: entry}), durable=False)


def _files_of_all(writing, count):
    """The files' entries in the manifest, when every process has written its own."""
    patience = time.monotonic() + _PATIENCE
    while True:
        reports = list(writing.glob("*.safetensors.json"))
        if len(reports) == count:
            break
        if time.monotonic() > patience:
            raise OSError(
                f"Expected files of {count} processes in {writing} after "
                f"{_PATIENCE} s; received: {len(reports)}"
            )
        time.sleep(0.05)
    files = {}
    for path in reports:
        files.update(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    if failed := [f"{name}: {x['error']}" for name, x in files.items() if "error" in x]:
        finite = all(x.get("finite", True) for x in files.values())
        raise (OSError if finite else NonFiniteValues)("; ".join(failed))
    return files


def _report_failure(writing, number, count, error):
    """So that the first process does not wait for this one."""
    name = f"arrays-{number:05d}-of-{count:05d}.safetensors"
    finite = not isinstance(error, NonFiniteValues)
    report = {name: {"error": str(error), "finite": finite}}
    # A full disk takes no report either: the first process waits in vain, and says so.
    with contextlib.suppress(OSError):
        write_text(writing / f"{name}.json", json.dumps(report), durable=False)


def _write(path, text):
    write_text(path, text)
    return manifest.entry_of(text.encode())


def _commit(writing, final):
    sync_folder(writing)
    # The older one is corrupt, or of the same step.
    aside = final.with_name(f"{_WRITING}replaced-{final.name}")
    replace_folder(writing, final, aside)


def _check_plain_file(path, name):
    """Refuses names that lead out of a checkpoint: whoever wrote it may be unknown."""
    if not is_plain_file(path, name):
        raise ValueError(
            f"expected a file in the folder itself, and no link; received: {name!r}"
        )
