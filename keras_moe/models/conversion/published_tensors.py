"""The interface of checkpoint readers: names, shapes, and one tensor at a time."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class TensorInfo(NamedTuple):
    """The description of a tensor in a checkpoint, before it is read.

    Attributes:
        shape: sizes of the tensor.
        dtype: name of the tensor's dtype, such as `"float32"` or `"bfloat16"`.
        file: name of the file that holds the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        """Its size in bytes, as stored."""
        size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return size * math.prod(self.shape)


class PublishedTensors(Mapping):
    """A checkpoint as a mapping from names to `TensorInfo`; `read` gets the values.

    Only `read` brings values to memory, and it keeps none. To be used in a `with`
    statement.
    """

    def __init__(self, path: str, tensors: dict[str, TensorInfo]):
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
        """Closes what is open."""

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The values of a tensor, or of some rows (of its first axis).

        bfloat16 comes as float32, which holds it exactly.
        """
        raise NotImplementedError


# Numbers that a weight may be stored as; anything else is another kind of file.
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATS, "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))


def check_dtype(dtype: str, name: str, file: str) -> str:
    """`dtype`, if it is one of plain numbers."""
    if dtype not in DTYPES:
        raise ValueError(
            f"Expected a tensor of plain numbers for {name!r} in {file}; "
            f"received: dtype={dtype!r}"
        )
    return dtype


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 as float32: NumPy has no such dtype of its own."""
    wide = bits.astype("uint32")
    wide <<= 16
    return wide.view("float32")


def library(name: str):
    """A library of the `convert` extra, imported when it is first needed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(
            f"Reading this checkpoint needs the package {name}: "
            "pip install 'keras-moe[convert]'"
        ) from error
