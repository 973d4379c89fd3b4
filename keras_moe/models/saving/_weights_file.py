"""HDF5 weight files: written atomically and verified when read."""

import contextlib
import contextvars
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras
import ml_dtypes  # noqa: F401  NumPy then knows bfloat16.
import numpy as np

from keras_moe import _files
from keras_moe._checks import unfit
from keras_moe._compat import ask_to_proceed_with_overwrite, safe_get_h5_dataset
from keras_moe._types import KerasModel
from keras_moe.models._remote import check_file_exists, get_file
from keras_moe.models.saving import _preset_folder

# Advice if overrides do not fit the weights.
LOAD_ANEW = "load_weights=False makes a model of these arguments with initial weights"
# HDF5 overhead per array, in bytes.
_OVERHEAD = 4096

# Files of weights and presets have LoRA adapters merged into the kernels, so that other
# models can read them. Files of whole models keep them.
_merges_adapters = contextvars.ContextVar("merges_adapters", default=False)
merges_adapters = _merges_adapters.get


@contextlib.contextmanager
def merged_adapters() -> Iterator[None]:
    """Context in which what is saved has no adapters."""
    token = _merges_adapters.set(True)
    try:
        yield
    finally:
        _merges_adapters.reset(token)


@merged_adapters()
def save_weights(
    model: KerasModel,
    filepath: str | os.PathLike,
    overwrite: bool = True,
    max_shard_size: float | None = None,
    objects_to_skip: Sequence = (),
) -> None:
    """Saves weights atomically."""
    path = Path(filepath)
    options = {
        "max_shard_size": max_shard_size,
        "objects_to_skip": list(objects_to_skip),
    }
    sharded = max_shard_size is not None
    endings = ("weights.h5", "weights.json") if sharded else (".weights.h5",)
    variables = _saved_variables(model, objects_to_skip)

    def save(target: str | os.PathLike) -> None:
        keras.saving.save_weights(model, target, overwrite=overwrite, **options)

    is_whole = path.name.endswith(endings) and model.built
    _save_whole(save, filepath, is_whole, overwrite, variables, max_shard_size)


def save_model(
    model: KerasModel, save: Callable[[Any], None], filepath: object, overwrite: bool
) -> None:
    """Saves a whole model atomically; `save` writes it to a path."""
    is_whole = str(filepath).endswith(".keras") and not hasattr(filepath, "write")
    variables = _saved_variables(model, ())
    _save_whole(save, filepath, is_whole, overwrite, variables)


def _save_whole(save, filepath, is_whole, overwrite, variables, shard=None):
    """Replaces a file once it is written; HDF5 ends the process if there is no room."""
    if not is_whole or "://" in str(filepath):
        # A remote file, copied from a temporary one, or a Keras error.
        save(filepath)
        return
    path = Path(filepath)
    if path.exists() and not overwrite and not ask_to_proceed_with_overwrite(str(path)):
        return
    size = _size_of(variables)
    sizes = [size]
    if shard:
        # Any of the variables may be in a shard. Of many small ones, some are joined.
        limit = int(max(min(shard * 1024**3, size), size / 64, 1))
        rest, overhead = range(size, 0, -limit), _OVERHEAD * len(variables)
        sizes = [min(limit, left) + overhead for left in rest]
    _files.check_room(path, *sizes)
    prefix = f".{path.name}."
    with tempfile.TemporaryDirectory(".part", prefix, dir=path.parent) as folder:
        try:
            save(Path(folder) / path.name)
            _finish(Path(folder), path.parent)
        except OSError as error:
            raise _files.write_failed(error, path, size) from error


def _finish(folder, target):
    """Moves finished files into place and adds checksums to the index."""
    files = sorted(folder.iterdir())
    for index in folder.glob("*.json"):
        content = json.loads(_files.read_text(index))
        sums = {file.name: _files.sha256_of(file) for file in files if file != index}
        content["metadata"][_preset_folder.CHECKSUMS] = sums
        _files.write_json(index, content)
        # Index first: if the process is killed in between, its checksums do not match,
        # so new and old shards are never mixed.
        files = [index, *(file for file in files if file != index)]
    for file in files:
        _files.sync_file(file)
    for file in files:
        # New files follow the umask.
        os.replace(file, target / file.name)
    _files.sync_folder(target)


def _saved_variables(model, skipped):
    owners = [model, *filter(None, [getattr(model, "optimizer", None)])]
    left_out = {id(x) for owner in skipped for x in owner.variables}
    variables = {id(x): x for owner in owners for x in owner.variables}
    return [x for key, x in variables.items() if key not in left_out]


def _size_of(variables: Iterable[keras.Variable]) -> int:
    return sum(
        _OVERHEAD
        + math.prod(x.shape)
        * np.dtype(keras.backend.standardize_dtype(x.dtype)).itemsize
        for x in variables
    )


@contextlib.contextmanager
def new_hdf5(path: str | os.PathLike, variables: Iterable) -> Iterator[h5py.File]:
    """Opens an HDF5 file that atomically replaces `path` when closed."""
    with (
        _files.new_file(path, _size_of(variables)) as file,
        h5py.File(file.name, "w") as hdf5,
    ):
        yield hdf5


@contextlib.contextmanager
def checked_weights(filepath: str | os.PathLike) -> Iterator[None]:
    """Context that verifies checksums and names a damaged file in errors."""
    files = _preset_folder.compare_checksums(Path(filepath))
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
    try:
        with h5py.File(file, "r") as hdf5:
            # One at a time, to save memory.
            _visit(hdf5, lambda _, value: None)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def plain_values(hdf5: h5py.File) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by path."""
    values = {}
    _visit(hdf5, values.__setitem__)
    return values


def _visit(hdf5, use):
    def read(path, value):
        if not isinstance(value, h5py.Dataset):
            return
        if value.external or value.is_virtual:
            expected = f"arrays in {hdf5.filename} itself"
            raise unfit(expected, f"{path}, whose values are in another file")
        # Keras refuses a declared shape with hardly any data in the file.
        use(path, safe_get_h5_dataset(hdf5, path)[()])

    hdf5.visititems(read)


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a saved preset, from a folder or handle."""

    path: str
    # Whether to load the task's own weights, and any.
    has_head: bool
    is_wanted: bool = True
    # In messages.
    name: str | None = None

    def fills_backbone(self) -> bool:
        return self.is_wanted

    def fills_head(self) -> bool:
        wanted = self.is_wanted and self.has_head
        return wanted and check_file_exists(self.path, "task.weights.h5")

    def load(self, model: Any, progress: Any = None) -> None:
        if not self.is_wanted:
            return
        with _preset_folder.explained(self.path, self.name, LOAD_ANEW):
            if self.fills_head():
                model.load_task_weights(get_file(self.path, "task.weights.h5"))
            is_whole = check_file_exists(self.path, "model.weights.h5")
            name = "model.weights.h5" if is_whole else _preset_folder.INDEX
            file = Path(get_file(self.path, name))
            if not is_whole:
                content = json.loads(_files.read_text(file))
                for shard in _preset_folder.shard_names(file, content):
                    get_file(self.path, shard)
            model.backbone.load_weights(file)

    def check(self) -> None:
        if self.is_wanted and "://" not in self.path:
            _preset_folder.compare_preset(self.path)

    def explained(self) -> contextlib.AbstractContextManager:
        return _preset_folder.explained(self.path, self.name)

    def close(self) -> None:
        """Does nothing: no file stays open."""
