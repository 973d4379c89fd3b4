"""Files of arrays in the safetensors format, written and read array by array.

The `safetensors` package writes a dict of whole arrays; a checkpoint must not hold all
of a model in memory beside the model.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from keras_moe.files import write_all, write_failed

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
DTYPES = {stored: name for name, stored in NAMES.items()}
_CHUNK = 1 << 22


class NonFiniteValues(ValueError):
    """An array that was to be written has NaN or Inf."""


class Tensor(NamedTuple):
    """An array that is to be written.

    Attributes:
        name: in the file.
        shape: of the array.
        dtype: its name.
        read: gives the array, when it is its turn.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def write_tensors(path: str | os.PathLike, tensors: Iterable[Tensor]) -> str:
    """Writes arrays one after the other, and has the file on the disk at the end.

    Args:
        path: of the new file.
        tensors: `Tensor`s, whose names differ.

    Returns:
        The file's SHA-256.

    Raises:
        NonFiniteValues: if an array is not finite.
        ValueError: if a dtype is not known.
        OSError: with the path and the bytes, if the file cannot be written.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.training.tensor_file import Tensor, TensorFile, write_tensors
    >>> path = os.path.join(tempfile.mkdtemp(), "one.safetensors")
    >>> made = write_tensors(path, [Tensor("a", (2,), "float32", lambda: np.ones(2))])
    >>> TensorFile(path).read("a").tolist()
    [1.0, 1.0]
    """
    tensors = list(tensors)
    header, offset = {}, 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise ValueError(
                f"Expected a dtype among {tuple(NAMES)}; received: "
                f"dtype={tensor.dtype!r} of {tensor.name}"
            )
        size = math.prod(tensor.shape) * np.dtype(_dtype(tensor.dtype)).itemsize
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    # What is hashed goes to the disk at once.
    with open(path, "wb", buffering=0) as file:

        def write(chunk):
            digest.update(chunk)
            try:
                write_all(file, chunk)
            except OSError as error:
                raise write_failed(error, path, 8 + len(text) + offset) from error

        write(memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors:
            # Keras reads bfloat16 of some backends as float32, which loses nothing.
            array = np.asarray(tensor.read()).astype(_dtype(tensor.dtype), copy=False)
            flat = np.ascontiguousarray(array).reshape(-1)
            for start in range(0, flat.size, _CHUNK):
                part = flat[start : start + _CHUNK]
                _check_finite(part, tensor)
                write(memoryview(part.view("uint8")))
        os.fsync(file.fileno())
    return digest.hexdigest()


def _check_finite(part, tensor):
    if tensor.dtype.startswith("float8"):
        part = part.astype("float32")
    if "float" in tensor.dtype and not np.isfinite(part).all():
        raise NonFiniteValues(
            f"Expected finite values; received: NaN or Inf in {tensor.name}"
        )


def _dtype(name):
    return getattr(ml_dtypes, name, None) or np.dtype(name)


class TensorFile:
    """Reads arrays of a file, each where it lies.

    Args:
        path: of a safetensors file.

    Raises:
        ValueError: if the file is no such file.

    Example: see `write_tensors`.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = self.path.stat().st_size
                self._header = json.loads(file.read(min(length, size)))
            self._start = 8 + length
            self._header.pop("__metadata__", None)
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"Expected a safetensors file; received: {self.path} ({error})"
            ) from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array by its name."""
        return {name: tuple(entry["shape"]) for name, entry in self._header.items()}

    def read(self, name: str) -> np.ndarray:
        """An array by its name, mapped from the file: read where it is looked at."""
        entry = self._header[name]
        dtype = np.dtype(_dtype(DTYPES[entry["dtype"]]))
        shape = tuple(entry["shape"])
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        offset = self._start + entry["data_offsets"][0]
        return np.memmap(self.path, dtype, "r", offset, shape or (1,)).reshape(shape)
