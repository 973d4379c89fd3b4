"""Files of arrays in the safetensors format, written array by array.

The `safetensors` package writes a dict of whole arrays; a checkpoint must not hold all
of a model in memory beside the model. It reads what is written here.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
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
    # Their bits, as the package has no NumPy arrays of these.
    "float8_e4m3fn": "U8",
    "float8_e5m2": "U8",
}
_CHUNK = 1 << 22


class NonFiniteValues(ValueError):
    """An array that was to be written has NaN or Inf."""


class Tensor(NamedTuple):
    """An array that is to be written.

    Attributes:
        name: name in the file.
        shape: shape of the array.
        dtype: name of its dtype.
        read: function that gives the array when it is its turn.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def write_tensors(path: str | os.PathLike, tensors: Iterable[Tensor]) -> str:
    """Writes arrays one after the other, and has the file on the disk at the end.

    Eight-bit floats are written as their bits, uint8.
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
    # The bytes that are hashed go to the disk at once.
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
