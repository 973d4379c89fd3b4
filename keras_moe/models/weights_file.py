"""HDF5 files of weights: a failed write raises OSError, and does not end the process.

HDF5 aborts the process when it closes a file that it could not write. Here it writes to
a stream that keeps errors to itself, and whose file takes its place when all of it is
on the disk. Arrays are written one after the other, straight to the disk: no part of a
model is in memory twice.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import keras
import numpy as np

from keras_moe.compat import (
    H5IOStore,
    ShardedH5IOStore,
    ask_to_proceed_with_overwrite,
    check_file_exists,
    get_file,
    safe_get_h5_dataset,
    save_state,
)
from keras_moe.files import new_file, sha256_of, write_all, write_failed
from keras_moe.models.preset_folder import (
    CHECKSUMS,
    INDEX,
    compare_checksums,
    compare_preset,
    explained,
)

# The remedy where arguments other than the saved ones do not fit the weights.
LOAD_ANEW = "load_weights=False makes a model of these arguments with initial weights"


class _Stream:
    """A file for HDF5, to which a failed write looks like one that was done.

    HDF5 makes a SystemError of an interrupt that is raised here: it is kept, too, and
    raised by `check`.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self.path = file, path
        self._position = self._end = 0
        self._error = None

    def check(self):
        """Raises the error of the first call that failed."""
        if isinstance(self._error, OSError):
            raise write_failed(self._error, self.path, self._end) from self._error
        if self._error is not None:
            raise self._error

    def sync(self):
        """Brings the file to the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(error, self.path, self._end) from error

    def sha256(self):
        """The SHA-256 of what is in the file."""
        return sha256_of(self._file.name)

    def seek(self, offset, whence=os.SEEK_SET):
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}
        self._position = start[whence] + offset
        return self._position

    def tell(self):
        return self._position

    def read(self, size=-1):
        size = self._end - self._position if size < 0 else size
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])

    def readinto(self, buffer):
        """Reads what was written; zeros in the place of what was not."""
        start, size = self._position, memoryview(buffer).nbytes
        self._position = start + size

        def read():
            rest = memoryview(buffer).cast("B")
            rest[:] = bytes(size)
            self._file.seek(start)
            while len(rest) and (count := self._file.readinto(rest)):
                rest = rest[count:]

        self._try(read)
        return size

    def write(self, data):
        start, size = self._position, memoryview(data).nbytes
        self._position = start + size
        self._end = max(self._end, self._position)

        def write():
            self._file.seek(start)
            write_all(self._file, data)

        self._try(write)
        return size

    def truncate(self, size=None):
        self._end = self._position if size is None else size
        self._try(lambda: self._file.truncate(self._end))
        return self._end

    def flush(self):
        """Does nothing: the file has no buffer, and is synchronised at its end."""

    def _try(self, act):
        # After the first error there is nothing to save any more.
        try:
            if self._error is None:
                act()
        except BaseException as error:
            self._error = error


@contextlib.contextmanager
def _checked(stream_of):
    """Raises the stream's first error, in place of those of HDF5 that follow."""
    try:
        yield
    except Exception:
        stream_of().check()
        raise
    stream_of().check()


@contextlib.contextmanager
def new_hdf5(path: str | os.PathLike) -> Iterator[h5py.File]:
    """An HDF5 file to write to, which takes its place when all is written."""
    with new_file(path) as file:
        stream = _Stream(file, Path(path))
        with _checked(lambda: stream), h5py.File(stream, "w") as hdf5:
            yield hdf5


class _StreamedStore:
    """The common part of Keras's stores of weights here: files that are streams."""

    def __init__(self, path, files, *arguments, **kwargs):
        self._files, self._streams = files, []
        super().__init__(path, *arguments, mode="w", **kwargs)

    def _get_h5_file(self, path_or_io, mode=None):
        path = Path(path_or_io)
        stream = _Stream(self._files.enter_context(new_file(path)), path)
        self._streams.append(stream)
        with _checked(self._stream):
            return h5py.File(stream, "w")

    def _stream(self):
        return self._streams[-1]

    def __setitem__(self, key, value):
        # Not at the end: a large model takes minutes.
        with _checked(self._stream):
            super().__setitem__(key, value)

    def close(self):
        hdf5, self.h5_file = self.h5_file, None
        with _checked(self._stream):
            if hdf5 is not None:
                hdf5.close()


class _Store(_StreamedStore, H5IOStore):
    pass


class _ShardedStore(_StreamedStore, ShardedH5IOStore):
    def write_index(self):
        """Writes the index, which takes its place with the shards, and not after them.

        A process that is killed while they do leaves an index whose checksums do not
        fit: the weights are refused, where old and new ones would be mixed.
        """
        for stream in self._streams:
            stream.sync()
        metadata = self.sharding_config["metadata"]
        metadata["total_size"] = self.total_shard_size
        metadata[CHECKSUMS] = {x.path.name: x.sha256() for x in self._streams}
        data = (json.dumps(self.sharding_config, indent=2) + "\n").encode()
        file = self._files.enter_context(new_file(self.path))
        try:
            write_all(file, data)
            os.fsync(file.fileno())
        except OSError as error:
            raise write_failed(error, self.path, len(data)) from error

    def _restore_h5_file(self):
        """Does nothing: the last file is the open one, and a stream has no name."""


def save_weights(
    model: keras.Model,
    filepath: str | os.PathLike,
    overwrite: bool = True,
    max_shard_size: float | None = None,
    objects_to_skip: Sequence = (),
) -> None:
    """Saves weights in the files of `keras.saving.save_weights`, whole or not
    at all.
    """
    path = str(filepath)
    sharded = max_shard_size is not None
    endings = ("weights.h5", "weights.json") if sharded else (".weights.h5",)
    if "://" in path or not path.endswith(endings) or not model.built:
        # A remote file, which is copied from a temporary one; or an error of Keras.
        keras.saving.save_weights(
            model,
            filepath,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            objects_to_skip=list(objects_to_skip),
        )
        return
    if (
        os.path.exists(path)
        and not overwrite
        and not ask_to_proceed_with_overwrite(path)
    ):
        return
    skipped = {id(x) for x in objects_to_skip}
    # The files take their places when the last one is whole.
    with contextlib.ExitStack() as files:
        if sharded:
            store = _ShardedStore(path, files, max_shard_size=max_shard_size)
        else:
            store = _Store(path, files)
        try:
            save_state(model, store, None, "", skipped)
        except BaseException:
            with contextlib.suppress(Exception):
                store.close()
            raise
        store.close()
        if sharded:
            store.write_index()


@contextlib.contextmanager
def checked_weights(filepath: str | os.PathLike) -> Iterator[None]:
    """Compares weights with the preset's checksums, and names a file that is
    damaged.
    """
    files = compare_checksums(Path(filepath))
    try:
        yield
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        for file in files:
            is_there = file.suffix == ".h5" and file.is_file()
            if is_there and (damage := _damage(file)):
                raise ValueError(
                    f"Expected a whole HDF5 file at {file}; received: {damage}. "
                    "The file is damaged or of another kind."
                ) from error
        raise


def _damage(file: Path) -> str | None:
    """Why a file cannot be read, or None if all of it can be."""

    try:
        with h5py.File(file, "r") as hdf5:
            # One at a time: a large model is not in memory as a whole.
            _visit(hdf5, lambda _, value: None)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def plain_values(hdf5: h5py.File) -> dict[str, np.ndarray]:
    """The arrays of a file by their paths."""
    values = {}
    _visit(hdf5, values.__setitem__)
    return values


def _visit(hdf5, use):
    def read(path, value):
        if not isinstance(value, h5py.Dataset):
            return
        if value.external or value.is_virtual:
            raise ValueError(
                f"Expected arrays in {hdf5.filename} itself; received: {path}, whose "
                "values are in another file"
            )
        # Keras refuses a shape of which the file has hardly any values.
        use(path, safe_get_h5_dataset(hdf5, path)[()])

    hdf5.visititems(read)


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
        return wanted and check_file_exists(self.path, "task.weights.h5")

    def load(self, model: keras.Model, progress: Any = None) -> None:
        """Fills the weights of a model that is like the saved one."""
        if not self.is_wanted:
            return
        backbone = getattr(model, "backbone", model)
        with explained(self.path, self.name, LOAD_ANEW):
            if self.fills_head():
                model.load_task_weights(get_file(self.path, "task.weights.h5"))
            backbone.load_weights(self._backbone_file())

    def _backbone_file(self):
        if check_file_exists(self.path, "model.weights.h5"):
            return get_file(self.path, "model.weights.h5")
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
