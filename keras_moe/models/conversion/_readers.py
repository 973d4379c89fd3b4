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

from keras_moe._checks import import_extra, unfit
from keras_moe._files import open_regular, read_bytes, read_text, regular_file

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


# V-MoE checkpoints: an index and shards, both msgpack with Flax's types.
#
# `<prefix>.index` lists each tensor's shape and dtype. `<prefix>.data-0000i-of-0000N`
# maps a tensor's number (its index among the names sorted level by level) to pairs of
# flat pieces and a slice.

_MAGIC = "__msgpack_array_chunk_a87ca2__"
# Bytes of the number that follows the first byte of a msgpack header: of lengths of
# bytes, extensions, texts, arrays and maps, and of integers.
_WIDTHS = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
}  # fmt: skip


class _Chunk(NamedTuple):
    """A slice of a tensor: shard, (start, stop) per axis, (offset, bytes) of pieces."""

    shard: str
    bounds: list[tuple[int, int]]
    pieces: list[tuple[int, int]]


class VMoECheckpoint(PublishedTensors):
    """A V-MoE checkpoint's tensors; opening reads headers, values come on demand."""

    def __init__(self, prefix: str | os.PathLike):
        prefix = str(prefix).removesuffix(".index")
        tensors, count = read_vmoe_index(f"{prefix}.index")
        super().__init__(prefix, tensors)
        self._chunks = {name: [] for name in tensors}
        for number in range(count):
            path = shard_path(prefix, number, count)
            try:
                self._scan(path)
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise _damaged("a shard", path, error) from error
        for name, info in tensors.items():
            stored = sum(size for x in self._chunks[name] for _, size in x.pieces)
            if stored != info.nbytes:
                expected = f"{info.nbytes} bytes of {name!r} in {prefix}'s own shards"
                raise unfit(expected, stored)

    def _scan(self, path):
        """Finds each chunk's bytes without loading it, which msgpack's reader would."""
        names, unpackb = list(self), _msgpack().unpackb
        with open_regular(path, buffering=512) as stream:
            for _ in range(_number(stream)):
                key = stream.read(_number(stream)).decode()
                if key == _MAGIC:
                    stream.read(1)
                    continue
                name = names[int(key)]
                for _ in range(_number(stream)):
                    _number(stream)
                    pieces = [_piece(stream) for _ in range(_number(stream))]
                    bounds = [
                        tuple(unpackb(axis)[:2])
                        for axis in unpackb(stream.read(_extension(stream)))
                    ]
                    self._chunks[name].append(_Chunk(path, bounds, pieces))
                self._tensors[name] = self[name]._replace(file=path)
            if stream.tell() != os.path.getsize(path):
                raise ValueError(f"{os.path.getsize(path)} bytes")

    def read(self, name: str) -> np.ndarray:
        array = np.empty(self[name].shape, self[name].dtype)
        for chunk in self._chunks[name]:
            # The ellipsis gives a view even of a scalar.
            part = array[(..., *(slice(*bounds) for bounds in chunk.bounds))]
            # No copy if the part is contiguous.
            values = part if part.flags.c_contiguous else np.empty_like(part)
            target = values.reshape(-1).view("uint8").data
            with open_regular(chunk.shard) as stream:
                for offset, size in chunk.pieces:
                    stream.seek(offset)
                    stream.readinto(target[:size])  # pyright: ignore[reportAttributeAccessIssue]
                    target = target[size:]
            if values is not part:
                part[...] = values
        return array


def shard_path(prefix: str, number: int, count: int) -> str:
    return f"{prefix}.data-{number:05d}-of-{count:05d}"


def read_vmoe_index(path: str) -> tuple[dict[str, TensorInfo], int]:
    """Returns the tensors in the order of their numbers, and the number of shards."""
    msgpack = _msgpack()

    def info(_, data):
        shape, dtype, *_ = msgpack.unpackb(msgpack.unpackb(data)[0])
        return TensorInfo(tuple(shape), dtype, path)

    packed = read_bytes(path)
    try:
        content = msgpack.unpackb(packed, ext_hook=info)
        return dict(_leaves(content["index"], "")), content["shard_count"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged("the index", path, error) from error


def _damaged(what, path, error):
    return ValueError(
        f"Expected {what} of a V-MoE checkpoint at {path}; received: "
        f"{type(error).__name__}: {error}. The file is truncated or has another format."
    )


def _msgpack():
    """Imports msgpack, which only these checkpoints need."""
    needs = "Reading this checkpoint needs the package msgpack"
    return import_extra("msgpack", needs, "convert")


def _leaves(tree, parent):
    """Yields names and tensors in JAX's order: keys sorted as strings."""
    for key in sorted(tree):
        if isinstance(tree[key], dict):
            yield from _leaves(tree[key], f"{parent}{key}/")
        elif tree[key] is not None:
            yield f"{parent}{key}", tree[key]


def _number(stream):
    """Reads a msgpack header: the length of what follows, or an integer."""
    byte = stream.read(1)[0]
    if byte < 0x80:
        return byte
    if byte in _WIDTHS:
        return int.from_bytes(stream.read(_WIDTHS[byte]), "big")
    if 0xD4 <= byte <= 0xD8:
        # Extensions of 1, 2, 4, 8 and 16 bytes.
        return 1 << (byte - 0xD4)
    if byte < 0xC0:
        # Small maps, arrays and texts.
        return byte & (0x0F if byte < 0xA0 else 0x1F)
    raise ValueError(f"msgpack byte 0x{byte:02x} at {stream.tell() - 1}")


def _extension(stream):
    """Reads an extension's header; returns the size of its data."""
    size = _number(stream)
    stream.read(1)
    return size


def _piece(stream):
    """Returns offset and size of an array's bytes, and skips them."""
    _extension(stream)
    # (shape, dtype, bytes)
    _number(stream)
    for _ in range(_number(stream)):
        _number(stream)
    stream.seek(_number(stream), os.SEEK_CUR)
    size = _number(stream)
    start = stream.tell()
    stream.seek(start + size)
    return start, size
