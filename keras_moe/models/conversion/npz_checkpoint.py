"""Reads `.npz` files, such as the releases of ViT, AugReg, SAM and MLP-Mixer."""

import os
import zipfile

import numpy as np
from numpy.lib import format as npy

from keras_moe.models.conversion.published_tensors import (
    PublishedTensors,
    TensorInfo,
    check_dtype,
)

# No deflated stream is longer than this many times its stored bytes.
_LARGEST_RATIO = 1032
_PIECE = 1 << 24


class NpzCheckpoint(PublishedTensors):
    """The arrays of an `.npz`; nothing in it is ever unpickled."""

    def __init__(self, path: str | os.PathLike):
        self._offsets = {}
        try:
            self._zip = zipfile.ZipFile(path)
        except Exception as error:  # Damaged tables raise many kinds.
            raise ValueError(
                f"Expected a whole .npz file at {path}; received: {error}. "
                "The file is truncated or of another kind."
            ) from error
        try:
            tensors = {}
            for entry in self._zip.infolist():
                name = entry.filename.removesuffix(".npy")
                if name == entry.filename or name in tensors:
                    raise ValueError(
                        f"Expected each member of {path} once, as .npy; received: "
                        f"{entry.filename!r}"
                    )
                tensors[name] = self._info(path, entry)
        except BaseException:
            self._zip.close()
            raise
        super().__init__(path, tensors)

    def _info(self, path, entry):
        name = entry.filename.removesuffix(".npy")
        try:
            with self._zip.open(entry) as stream:
                shape, order, dtype = self._header(stream)
                self._offsets[name] = stream.tell()
        except Exception as error:  # Encrypted, of unknown compression, no header, ...
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
                f"Expected sizes of at least 1 of {name!r} in {path}; received: "
                f"shape={shape}"
            )
        info = TensorInfo(shape, check_dtype(dtype.name, name, path), str(path))
        declared = self._offsets[name] + info.nbytes
        possible = _LARGEST_RATIO * (entry.compress_size + 1)
        if order or declared != entry.file_size or declared > possible:
            raise ValueError(
                f"Expected {name!r} in {path} to hold a C-ordered array of its stored "
                f"size; received: shape={shape}, fortran_order={order}, "
                f"{entry.file_size} bytes in {entry.compress_size}"
            )
        return info

    @staticmethod
    def _header(stream):
        version = npy.read_magic(stream)
        if version == (1, 0):
            return npy.read_array_header_1_0(stream)
        return npy.read_array_header_2_0(stream)

    def close(self) -> None:
        self._zip.close()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        array = np.empty(info.shape, info.dtype)
        target = memoryview(array.reshape(-1).view("uint8"))
        try:
            with self._zip.open(f"{name}.npy") as stream:
                _, _, dtype = self._header(stream)
                done = 0
                while done < len(target):
                    piece = stream.readinto(target[done : done + _PIECE])
                    if not piece:
                        raise EOFError(f"{done} of {len(target)} bytes")
                    done += piece
                # The checksum is compared at the end alone.
                stream.read(1)
        except Exception as error:  # Each compression has its own.
            raise ValueError(
                f"Expected whole values of {name!r} in {self.path}; received: {error}"
            ) from error
        if dtype.byteorder == ">":
            array.byteswap(inplace=True)
        return array if rows is None else array[rows]
