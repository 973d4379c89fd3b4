"""Reads V-MoE checkpoints: an index and shards, both msgpack with Flax's types.

`<prefix>.index` lists each tensor's shape and dtype. `<prefix>.data-0000i-of-0000N`
maps a tensor's number (its index among the names sorted level by level) to pairs of
flat pieces and a slice.
"""

import os
from typing import NamedTuple

import numpy as np

from keras_moe._checks import import_extra, unfit
from keras_moe._files import open_regular, read_bytes
from keras_moe.models.conversion._readers import PublishedTensors, TensorInfo

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
