"""Checkpoint readers. They read one tensor at a time and never unpickle."""

import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open

# Supported dtypes of weights.
FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = (*FLOATS, "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
_SAFETENSORS_DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "BOOL": "bool",
    **{f"{k}{n}": f"{'u' * (k == 'U')}int{n}" for k in "IU" for n in (8, 16, 32, 64)},
}
# Maximum compression ratio of deflate.
_LARGEST_RATIO = 1032
_PIECE = 1 << 24


class TensorInfo(NamedTuple):
    """A tensor's shape, dtype name and file."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return size * math.prod(self.shape)


class PublishedTensors(Mapping):
    """A checkpoint as a mapping from names to `TensorInfo`; a context manager.

    Only `read` loads values, and it does not keep them.
    """

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

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns a tensor's values, or some rows; bfloat16 becomes float32."""
        raise NotImplementedError


class SafetensorsCheckpoint(PublishedTensors):
    """Tensors of a `.safetensors` file, or several with an index."""

    def __init__(self, path: str | os.PathLike, paths: dict[str, str] | None = None):
        path = Path(path)
        self._files = {}
        weight_map = None
        if path.name.endswith(".json"):
            weight_map = read_index(path)
            paths = paths or {name: path.parent / name for name in weight_map.values()}
        else:
            paths = {path.name: path}
        super().__init__(path, {})
        try:
            for file in map(str, paths.values()):
                self._open(file)
        except BaseException:
            self.close()
            raise
        for name, file in (weight_map or {}).items():
            if name not in self or self[name].file != str(paths[file]):
                raise ValueError(
                    f"Expected {name!r} in {paths[file]}, where {path} lists it; "
                    "received a file without it"
                )

    def _open(self, file):
        try:
            # Checks the header against the file size.
            opened = safe_open(file, framework="numpy").__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"Expected a whole .safetensors file at {file}; received: {error}. "
                "The file is truncated or has another format."
            ) from error
        self._files[file] = opened
        for name in opened.keys():  # noqa: SIM118
            if name in self:
                raise ValueError(
                    f"Expected each tensor once; received: {name!r} in "
                    f"{self[name].file} and {file}"
                )
            part = opened.get_slice(name)
            dtype = _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
            check_dtype(dtype, name, file)
            self._tensors[name] = TensorInfo(tuple(part.get_shape()), dtype, file)

    def close(self) -> None:
        for opened in self._files.values():
            opened.__exit__(None, None, None)
        self._files = {}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        if info.dtype == "bfloat16":
            return self._read_bfloat16(name, info, rows)
        if rows is None:
            return self._files[info.file].get_tensor(name)
        return self._files[info.file].get_slice(name)[rows]

    def _read_bfloat16(self, name, info, rows):
        """Reads raw bytes, since safetensors cannot return bfloat16 as NumPy."""
        with open(info.file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            begin, _ = json.loads(stream.read(size))[name]["data_offsets"]
            start, stop, _ = (rows or slice(None)).indices((*info.shape, 1)[0])
            shape = info.shape
            if rows is not None:
                shape = (stop - start, *shape[1:])
                begin += 2 * start * math.prod(shape[1:])
            stream.seek(8 + size + begin)
            bits = np.fromfile(stream, "<u2", math.prod(shape))
        return from_bfloat16(bits.reshape(shape))


def read_index(path: str | os.PathLike) -> dict[str, str]:
    """Returns the file of each tensor from a `.safetensors.index.json`."""
    try:
        weight_map = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
        are_beside = all(
            Path(file).name == file and file.endswith(".safetensors") for file in files
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a weight_map of file names in {path}; received a file of "
            "another format"
        ) from error
    if not are_beside:
        raise ValueError(
            f"Expected .safetensors files of the same folder in {path}; received: "
            f"{sorted(files)}"
        )
    return weight_map


class NpzCheckpoint(PublishedTensors):
    """Arrays of an `.npz`, such as ViT, AugReg and MLP-Mixer releases.

    `np.load` allocates whatever a header declares; here sizes are checked first.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            self._zip = zipfile.ZipFile(path)
        except Exception as error:  # Damaged tables raise many kinds of errors.
            raise ValueError(
                f"Expected a whole .npz file at {path}; received: {error}. "
                "The file is truncated or has another format."
            ) from error
        super().__init__(path, {})
        try:
            for entry in self._zip.infolist():
                name = entry.filename.removesuffix(".npy")
                if name == entry.filename or name in self:
                    raise ValueError(
                        f"Expected each member of {path} once, as .npy; received: "
                        f"{entry.filename!r}"
                    )
                self._tensors[name] = self._info(name, entry)
        except BaseException:
            self._zip.close()
            raise

    def _info(self, name, entry):
        path = self.path
        try:
            with self._zip.open(entry) as stream:
                shape, is_fortran, dtype = _npy_header(stream)
                offset = stream.tell()
        except Exception as error:  # Encrypted, unknown compression, no header, ...
            raise ValueError(
                f"Expected an .npy array as {name!r} in {path}; received: {error}"
            ) from error
        if dtype.hasobject:
            raise ValueError(
                f"Expected plain numbers as {name!r} in {path}; received an array of "
                "Python objects, which is never unpickled"
            )
        if not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(
                f"Expected sizes of at least 1 for {name!r} in {path}; received: "
                f"shape={shape}"
            )
        info = TensorInfo(shape, check_dtype(dtype.name, name, path), path)
        declared = offset + info.nbytes
        possible = _LARGEST_RATIO * (entry.compress_size + 1)
        if is_fortran or declared != entry.file_size or declared > possible:
            raise ValueError(
                f"Expected {name!r} in {path} to hold a C-ordered array of its stored "
                f"size; received: shape={shape}, fortran_order={is_fortran}, "
                f"{entry.file_size} bytes in {entry.compress_size}"
            )
        return info

    def close(self) -> None:
        self._zip.close()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        array = np.empty(info.shape, info.dtype)
        target = memoryview(array.reshape(-1).view("uint8"))
        try:
            with self._zip.open(f"{name}.npy") as stream:
                _, _, dtype = _npy_header(stream)
                done = 0
                while done < len(target):
                    piece = stream.readinto(target[done : done + _PIECE])
                    if not piece:
                        raise EOFError(f"{done} of {len(target)} bytes")
                    done += piece
                # The checksum is only verified at the end.
                stream.read(1)
        except Exception as error:  # Each compression raises its own errors.
            raise ValueError(
                f"Expected whole values of {name!r} in {self.path}; received: {error}"
            ) from error
        if dtype.byteorder == ">":
            array.byteswap(inplace=True)
        return array if rows is None else array[rows]


def _npy_header(stream):
    """Returns shape, Fortran order and dtype."""
    if npy.read_magic(stream) == (1, 0):
        return npy.read_array_header_1_0(stream)
    return npy.read_array_header_2_0(stream)


def check_dtype(dtype: str, name: str, file: str) -> str:
    """Raises ValueError for dtypes that are not plain numbers."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"Expected a tensor of plain numbers for {name!r} in {file}; "
            f"received: dtype={dtype!r}"
        )
    return dtype


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Converts bfloat16 bits (uint16) to float32."""
    wide = bits.astype("uint32")
    wide <<= 16
    return wide.view("float32")
