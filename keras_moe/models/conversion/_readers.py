"""Checkpoint readers. They read one tensor at a time and never unpickle."""

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16.
import numpy as np
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open

from keras_moe._checks import unfit
from keras_moe._files import open_regular, read_text, regular_file

# Dtypes of weights, by their names in `.safetensors`.
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
# Maximum compression ratio of deflate.
_LARGEST_RATIO = 1032


class TensorInfo(NamedTuple):
    """A tensor's shape, dtype name and file."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


class PublishedTensors(Mapping):
    """A checkpoint as a mapping to `TensorInfo`; only `read` loads values."""

    def __init__(self, path: str | os.PathLike, tensors: dict[str, TensorInfo]):
        self.path = str(path)
        self._tensors = tensors

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Closes open files."""

    def read(self, name: str) -> np.ndarray:
        raise NotImplementedError


class SafetensorsCheckpoint(PublishedTensors):
    """Tensors of a `.safetensors` file, or of the `files` that an index lists."""

    def __init__(
        self, path: str | os.PathLike, files: Sequence[str | os.PathLike] = ()
    ):
        super().__init__(path, {})
        self._opened, self._stack = {}, contextlib.ExitStack()
        try:
            for file in files or [path]:
                self._open(str(file))
        except BaseException:
            self.close()
            raise

    def _open(self, file):
        try:
            # Checks the header against the file size.
            opened = safe_open(regular_file(file), framework="numpy")
            self._stack.enter_context(opened)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"Expected a whole .safetensors file at {file}; received: {error}. "
                "The file is truncated or has another format."
            ) from error
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            dtype = str(part.get_dtype())
            dtype = FLOATS.get(dtype, dtype)
            self._opened[name] = opened
            self._tensors[name] = TensorInfo(tuple(part.get_shape()), dtype, file)

    def close(self) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        return self._opened[name].get_tensor(name)


def read_object(path: str | os.PathLike) -> dict:
    try:
        return dict(json.loads(read_text(path)))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a whole JSON object in {path}; received: {error}. "
            "The file is truncated or has another format."
        ) from error


def read_index(path: str | os.PathLike) -> list[str]:
    """Returns the file names in a `.safetensors.index.json`."""
    files = sorted(set(read_object(path).get("weight_map", {}).values()))
    if not files or any(Path(file).name != file for file in files):
        raise unfit(f"a weight_map to files of the same folder in {path}", files)
    return files


class NpzCheckpoint(PublishedTensors):
    """Arrays of an `.npz`, such as ViT, AugReg and MLP-Mixer releases."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path, {})
        self._file = open_regular(path)
        try:
            self._zip = zipfile.ZipFile(self._file)
        except zipfile.BadZipFile as error:
            self._file.close()
            raise ValueError(
                f"Expected a whole .npz file at {path}; received: {error}. "
                "The file is truncated or has another format."
            ) from error
        declared, largest = 0, _LARGEST_RATIO * os.path.getsize(path)
        try:
            for entry in self._zip.namelist():
                name = entry.removesuffix(".npy")
                with self._member(name) as stream:
                    shape, _, dtype = _npy_header(stream)
                    declared += math.prod(shape) * dtype.itemsize
                    if declared > largest:
                        raise ValueError(f"shape={shape}, more than the file can hold")
                self._tensors[name] = TensorInfo(shape, dtype.name, self.path)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _member(self, name):
        """Opens an array; errors name it and the file."""
        try:
            with self._zip.open(f"{name}.npy") as stream:
                yield stream
        except Exception as error:  # Each compression raises its own errors.
            raise unfit(f"a whole array as {name!r} in {self.path}", error) from error

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def read(self, name: str) -> np.ndarray:
        with self._member(name) as stream:
            array = npy.read_array(stream, allow_pickle=False)
            # The checksum is only verified at the end.
            stream.read(1)
        return array


def _npy_header(stream):
    if npy.read_magic(stream) == (1, 0):
        return npy.read_array_header_1_0(stream)
    return npy.read_array_header_2_0(stream)
