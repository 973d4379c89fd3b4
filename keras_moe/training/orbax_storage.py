"""Checkpoints by Orbax: for several processes of JAX, and for remote folders.

Beside `manifest.json`, the SHA-256 of each file and of itself, a checkpoint has

- `arrays-model`, `arrays-optimizer`, ...: a checkpoint of Orbax for each group, with
  the variables by their index;
- `state.json`: what is no array.

The manifest is written last, once every process has written its arrays and read them
again: a checkpoint without one was never finished. Orbax itself has no sums of the
arrays, and takes for a checkpoint what a disk has damaged.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_moe.files import write_text
from keras_moe.processes import process_shard
from keras_moe.training import manifest
from keras_moe.training.agreement import agreed, first_decides, shared_by
from keras_moe.training.array_pieces import is_sharded
from keras_moe.training.storage import Checkpoint, Storage, is_remote, remote_name
from keras_moe.training.tensor_writer import NonFiniteValues

_ARRAYS = "arrays-"
_OWNER = re.compile(r"process_(\d+)")
_READ_SIZE = 1 << 22


class OrbaxStorage(Storage):
    """Checkpoints that the processes of a distributed model write together.

    With a distribution of Keras all processes call each method together, and agree on
    what it finds. Without one a process works alone, also one of several: it reads
    what all have written. Folders are local, shared, or remote, as `gs://bucket/run`;
    any number of processes and devices, and any backend, reads them where JAX and
    orbax-checkpoint are installed.

    Args:
        folder: folder of all checkpoints of a run.

    Raises:
        ImportError: if orbax-checkpoint is not installed.

    Example:

    >>> import tempfile
    >>> import keras
    >>> from keras_moe.training import OrbaxStorage
    >>> storage, weight = OrbaxStorage(tempfile.mkdtemp()), keras.Variable([1.0, 2.0])
    >>> path = storage.save(7, {"model": [weight]}, {"note": "good"})
    >>> changed = weight.assign([0.0, 0.0])
    >>> checkpoint = storage.newest()
    >>> storage.restore(checkpoint, {"model": [weight]})
    >>> checkpoint.step, checkpoint.state["note"], keras.ops.max(weight).item()
    (7, 'good', 2.0)
    """

    def __init__(self, folder: str | os.PathLike):
        _orbax()
        super().__init__(folder)

    @staticmethod
    def as_path(folder: str | os.PathLike) -> Any:
        from etils import epath

        if is_remote(folder):
            return epath.Path(remote_name(folder))
        # Orbax takes no relative paths.
        return epath.Path(os.path.abspath(folder))

    def write(
        self,
        path: Any,
        step: int,
        groups: dict[str, Sequence[keras.Variable]],
        text: str,
    ) -> None:
        agreed(lambda: _check_finite(groups))
        first_decides(lambda: self._make_room(path))
        try:
            files: dict[str, dict] = {}
            for entries in agreed(lambda: self._write_arrays(path, groups)):
                files |= entries
            first_decides(lambda: self._commit(path, step, files, text))
        except BaseException:
            # An interruption, too, leaves nothing that is not whole.
            if self.writes_alone:
                path.rmtree(missing_ok=True)
            raise

    def _make_room(self, path):
        if path.exists():
            # One that is corrupt, or of the same step.
            self.remove(path)
        path.mkdir(parents=True)

    def _write_arrays(self, path, groups):
        """Writes this process's pieces, and returns the entries of its files."""
        ocp = _orbax()
        for group, variables in groups.items():
            values = {
                f"{index:05d}": self._to_write(variable)
                for index, variable in enumerate(variables)
                # Orbax refuses what is empty.
                if 0 not in variable.shape
            }
            if not values:
                continue
            place, args = path / f"{_ARRAYS}{group}", ocp.args.PyTreeSave(values)
            try:
                self._checkpointer().save(place, args=args)
            except Exception as error:
                # A full disk is a ValueError of TensorStore.
                raise OSError(f"{place} could not be written: {error}") from error
        index, count = shared_by()
        return {
            name: _entry(path / name)
            for name in _file_names(path)
            if _owner(name) % count == index
        }

    def _commit(self, path, step, files, text):
        _write_text(path / manifest.STATE, text)
        files = {**files, manifest.STATE: manifest.entry_of(text.encode())}
        # The last: without it there is no checkpoint.
        _write_text(path / manifest.NAME, manifest.manifest_text(step, files))

    def read(self, path: Any) -> Checkpoint:
        if not (path / manifest.NAME).exists():
            raise ValueError(f"{manifest.NAME} is not there: it was never finished")
        content = manifest.read_manifest(path)
        files = content["files"]
        manifest.check_names(files, set(_file_names(path)) - {manifest.NAME})
        index, count = shared_by()
        # Each process reads a share of the files.
        for name in sorted(files)[index::count]:
            if _entry(path / name) != files[name]:
                raise ValueError(f"{name} is not what was written")
        state, variables = manifest.read_state(path)
        return Checkpoint(path, content["step"], state, variables, tuple(files), self)

    def assign(
        self, checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
    ) -> None:
        ocp = _orbax()
        for group, variables in groups.items():
            named = {
                f"{index:05d}": variable
                for index, variable in enumerate(variables)
                if 0 not in variable.shape
            }
            if not named:
                continue
            args = ocp.args.PyTreeRestore(
                restore_args={x: self._place_of(v) for x, v in named.items()}
            )
            path = checkpoint.path / f"{_ARRAYS}{group}"
            values = self._checkpointer().restore(path, args=args)
            for name, variable in named.items():
                variable.assign(values[name])

    def remove(self, path: Any) -> None:
        # First what makes it a checkpoint: a part of one is never taken for one.
        (path / manifest.NAME).unlink(missing_ok=True)
        path.rmtree(missing_ok=True)

    def clean(self, everything: bool = False) -> None:
        first_decides(lambda: self._clean(everything))

    def _clean(self, everything):
        for path in self.paths():
            if everything or not (path / manifest.NAME).exists():
                self.remove(path)

    def _checkpointer(self):
        ocp = _orbax()
        options = ocp.options.MultiprocessingOptions()
        if shared_by()[1] == 1:
            number = process_shard()[0]
            # No process waits for others.
            options = ocp.options.MultiprocessingOptions(
                primary_host=number,
                active_processes={number},
                barrier_sync_key_prefix=f"process_{number}",
            )
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
        return ocp.Checkpointer(handler, multiprocessing_options=options)

    def _to_write(self, variable):
        value = variable.value
        if self._is_array_of_orbax(value):
            from keras_moe.ops.kernels.sharded_arrays_jax import with_shards

            return with_shards(value)
        return np.asarray(keras.ops.convert_to_numpy(value))

    def _place_of(self, variable):
        ocp, value = _orbax(), variable.value
        if not self._is_array_of_orbax(value):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(
            sharding=value.sharding, global_shape=value.shape, dtype=value.dtype
        )

    def _is_array_of_orbax(self, value):
        """Whether it is an array of JAX whose pieces Orbax finds by itself."""
        if not is_sharded(value):
            return False
        return shared_by()[1] == 1 or not value.is_fully_addressable


def is_orbax(path: Any) -> bool:
    """Whether a checkpoint's folder, finished or not, is one of `OrbaxStorage`."""
    return path.is_dir() and any(
        child.name.startswith(_ARRAYS) and child.is_dir() for child in path.iterdir()
    )


def _orbax():
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "Expected the package orbax-checkpoint, for checkpoints of several "
            "processes and in remote folders; install it with "
            'pip install "keras-moe[orbax]"'
        ) from error
    return ocp


def _check_finite(groups):
    for group, variables in groups.items():
        for index, variable in enumerate(variables):
            value = variable.value
            parts = [value]
            if is_sharded(value):
                from keras_moe.ops.kernels.sharded_arrays_jax import with_shards

                parts = [shard.data for shard in with_shards(value).addressable_shards]
            for part in parts:
                array = np.asarray(keras.ops.convert_to_numpy(part))
                is_float = "float" in array.dtype.name
                if is_float and not np.isfinite(array.astype("float32")).all():
                    raise NonFiniteValues(
                        "Expected finite values; received: NaN or Inf in "
                        f"{group}/{index:05d}/{variable.path}"
                    )


def _file_names(path) -> Iterator[str]:
    """The files below a folder, by their paths in it; links are refused."""
    for child in sorted(path.iterdir()):
        if not is_remote(child) and os.path.islink(child):
            raise ValueError(f"expected no link; received: {child.name!r}")
        if child.is_dir():
            for name in _file_names(child):
                yield f"{child.name}/{name}"
        else:
            yield child.name


def _owner(name):
    """The number of the process that wrote a file."""
    match = _OWNER.search(name)
    return int(match[1]) if match else 0


def _entry(path):
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_SIZE):
            digest.update(chunk)
            size += len(chunk)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _write_text(path, text):
    if is_remote(path):
        # An object is there as a whole or not at all.
        path.write_text(text)
    else:
        write_text(os.fspath(path), text)
