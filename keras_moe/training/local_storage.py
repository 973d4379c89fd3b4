"""Checkpoints on a local or shared disk, which any backend and any layout reads.

Beside `manifest.json`, the SHA-256 of each file and of itself, a checkpoint has

- `arrays-00000-of-00001.safetensors` of each process: its pieces of the variables;
- `state.json`: what is no array.

It is written to `.writing-step-00000120`, brought to the disk, read again, and renamed.
"""

import os
import shutil
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
from keras_moe.training import manifest
from keras_moe.training.agreement import agreed, first_decides, shared_by
from keras_moe.training.array_pieces import (
    assign_pieces,
    opened_pieces,
    pieces_to_write,
)
from keras_moe.training.storage import Checkpoint, Storage
from keras_moe.training.tensor_writer import write_tensors

_WRITING = ".writing-"


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

    def write(
        self,
        path: Path,
        step: int,
        groups: dict[str, Sequence[keras.Variable]],
        text: str,
    ) -> None:
        writing = self.folder / f"{_WRITING}{path.name}"
        try:
            files: dict[str, dict] = {}
            for entries in agreed(lambda: _write_arrays(writing, groups)):
                files |= entries
            first_decides(lambda: _commit(writing, path, step, files, text))
        except BaseException:
            if self.writes_alone:
                shutil.rmtree(writing, ignore_errors=True)
            raise

    def read(self, path: Path) -> Checkpoint:
        _check_plain_file(path, manifest.NAME)
        content = manifest.read_manifest(path)
        files = content["files"]
        for name in files:
            _check_plain_file(path, name)
        index, count = shared_by()
        # Each process reads a share of the files.
        for name in sorted(files)[index::count]:
            size = (path / name).stat().st_size
            is_same = size == files[name]["bytes"]
            if not is_same or sha256_of(path / name) != files[name]["sha256"]:
                raise ValueError(f"{name} is not what was written")
        state, variables = manifest.read_state(path)
        return Checkpoint(path, content["step"], state, variables, tuple(files), self)

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
        first_decides(lambda: self._clean(everything))

    def _clean(self, everything):
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


def _write_arrays(writing, groups):
    """Writes this process's pieces, and returns the entry of their file."""
    index, count = shared_by()
    writing.mkdir(parents=True, exist_ok=True)
    name = f"arrays-{index:05d}-of-{count:05d}.safetensors"
    tensors = [
        tensor
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
        for tensor in pieces_to_write(f"{group}/{number:05d}/{variable.path}", variable)
    ]
    sha256 = write_tensors(writing / name, tensors)
    if sha256_of(writing / name) != sha256:
        raise OSError(f"What is read from {writing / name} is not what was written")
    return {name: {"sha256": sha256, "bytes": (writing / name).stat().st_size}}


def _commit(writing, final, step, files, text):
    """Writes what is written once, and puts the checkpoint in its place."""
    files = {**files, manifest.STATE: _write(writing / manifest.STATE, text)}
    # The last: without it there is no checkpoint.
    _write(writing / manifest.NAME, manifest.manifest_text(step, files))
    sync_folder(writing)
    # The older one is corrupt, or of the same step.
    aside = final.with_name(f"{_WRITING}replaced-{final.name}")
    replace_folder(writing, final, aside)


def _write(path, text):
    write_text(path, text)
    return manifest.entry_of(text.encode())


def _check_plain_file(path, name):
    """Refuses names that lead out of a checkpoint: whoever wrote it may be unknown."""
    if not is_plain_file(path, name):
        raise ValueError(
            f"expected a file in the folder itself, and no link; received: {name!r}"
        )
