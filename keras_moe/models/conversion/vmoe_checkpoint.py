"""Reads V-MoE checkpoints: an index and shards, both msgpack with Flax's types.

`<prefix>.index` says of each tensor its shape, the slices in which it is stored, and
the shard of each slice. `<prefix>.data-0000i-of-0000N` maps a tensor's number (its
place among the names sorted level by level) to pairs of flat pieces and a slice.
"""

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_moe.models.conversion.msgpack_headers import MsgpackHeaders
from keras_moe.models.conversion.published_tensors import (
    PublishedTensors,
    TensorInfo,
    check_dtype,
    from_bfloat16,
    library,
)

# Types of msgpack's extension mechanism, as the release numbers them.
_SLICE_ND, _INDEX_INFO = 6, 8
_MAGIC = "__msgpack_array_chunk_a87ca2__"
_VERSIONS = (None, "20220622")
# An index has about 100 bytes per slice: this is a million of them.
_LARGEST_INDEX = 1 << 27


class _Chunk(NamedTuple):
    """A slice of a tensor: `bounds` per axis, and where its pieces' bytes are."""

    bounds: tuple[tuple[int, int], ...]
    shard: int
    pieces: list[tuple[int, int]]


class VMoECheckpoint(PublishedTensors):
    """The tensors of a V-MoE checkpoint.

    Opening it reads the index and the headers in the shards; the values are passed
    over, and read from their places on demand.
    """

    def __init__(self, prefix: str | os.PathLike):
        self._prefix = str(prefix).removesuffix(".index")
        names, self._stored, count = read_index(f"{self._prefix}.index")
        self.shards = [shard_path(self._prefix, i, count) for i in range(count)]
        for path in self.shards:
            if not os.path.isfile(path):
                raise ValueError(
                    f"Expected {count} shards beside {self._prefix}.index; received: "
                    f"no {path}"
                )
        super().__init__(self._prefix, {})
        declared = 0
        for name, (info, _, shards) in zip(names, self._stored):
            file = self.shards[shards[0]] if shards else self._prefix
            self._tensors[name] = info._replace(file=file)
            declared += info.nbytes
        stored = sum(os.path.getsize(path) for path in self.shards)
        if declared > stored:
            raise ValueError(
                f"Expected shards of at least {declared} bytes, the sizes that "
                f"{self._prefix}.index declares; received: {stored} bytes. A shard "
                "is truncated, or the index is of another checkpoint."
            )
        self._names = {name: number for number, name in enumerate(names)}
        self._chunks = [[] for _ in names]
        for shard in range(count):
            self._scan(shard, names)
        for name, number in self._names.items():
            self._check(name, number)

    def _scan(self, shard, names):
        """Notes where each chunk's bytes lie in a shard, without reading them."""
        path = self.shards[shard]
        with open(path, "rb", buffering=512) as stream:
            headers = MsgpackHeaders(stream, path)
            for _ in range(headers.size("map")):
                key = headers.text()
                if key == _MAGIC:
                    headers.skip_bool()
                    continue
                if not re.fullmatch(r"\d{1,9}", key) or int(key) >= len(names):
                    raise ValueError(
                        f"Expected numbers of tensors below {len(names)} as keys in "
                        f"{path}; received: {key!r}"
                    )
                number, name = int(key), names[int(key)]
                info = self._stored[number][0]
                headers.name = name
                for _ in range(headers.size("array")):
                    headers.expect_pair()
                    pieces = [
                        headers.piece(info.dtype) for _ in range(headers.size("array"))
                    ]
                    bounds = _bounds(headers.extension(_SLICE_ND), headers.where)
                    self._chunks[number].append(_Chunk(bounds, shard, pieces))
            headers.end()

    def _check(self, name, number):
        """Refuses chunks that do not fill the tensor, or are not those of the index."""
        info, slices, shards = self._stored[number]
        chunks = self._chunks[number]
        received = sorted((chunk.bounds, chunk.shard) for chunk in chunks)
        expected = sorted(zip(slices, shards))
        if received != expected:
            lost = [x for x in expected if x not in received]
            bounds, shard = lost[0] if lost else received[0]
            raise ValueError(
                f"Expected the slices of {name!r} that {self._prefix}.index lists; "
                f"received: {'no' if lost else 'another'} slice {bounds} in "
                f"{self.shards[shard]}"
            )
        filled = 0
        for chunk in chunks:
            size = np.prod([stop - start for start, stop in chunk.bounds], dtype=int)
            filled += int(size)
            length = int(size) * (info.nbytes // max(_size(info.shape), 1))
            outside = len(chunk.bounds) != len(info.shape) or any(
                not 0 <= start <= stop <= n
                for (start, stop), n in zip(chunk.bounds, info.shape)
            )
            stored = sum(length for _, length in chunk.pieces)
            if outside or stored != length:
                raise ValueError(
                    f"Expected {length} bytes for the slice {chunk.bounds} of "
                    f"{name!r} with shape {info.shape} in {self.shards[chunk.shard]}; "
                    f"received: {stored} bytes"
                )
        overlap = any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(x.bounds, y.bounds))
            for x, y in itertools.combinations(chunks, 2)
        )
        if filled != _size(info.shape) or overlap:
            raise ValueError(
                f"Expected slices that fill {name!r} with shape {info.shape} once in "
                f"{self._prefix}.index; received: {filled} values in {len(chunks)} "
                "slices"
            )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        dtype = "<u2" if info.dtype == "bfloat16" else np.dtype(info.dtype)
        array = np.empty(info.shape, dtype)
        for shard, chunks in itertools.groupby(
            self._chunks[self._names[name]], lambda chunk: chunk.shard
        ):
            with open(self.shards[shard], "rb") as stream:
                for chunk in chunks:
                    self._read_chunk(stream, chunk, array, name)
        if info.dtype == "bfloat16":
            array = from_bfloat16(array)
        return array if rows is None else array[rows]

    def _read_chunk(self, stream, chunk, array, name):
        # The ellipsis makes it a view also of a scalar.
        place = array[(..., *(slice(*bounds) for bounds in chunk.bounds))]
        # Straight into its place where that is one piece of memory.
        direct = place.flags.c_contiguous
        values = place if direct else np.empty(place.shape, array.dtype)
        target = memoryview(values.reshape(-1).view("uint8"))
        done = 0
        for offset, length in chunk.pieces:
            stream.seek(offset)
            if stream.readinto(target[done : done + length]) != length:
                raise ValueError(
                    f"Expected {length} bytes of {name!r} at {offset} in "
                    f"{self.shards[chunk.shard]}; received fewer: it is truncated"
                )
            done += length
        if not direct:
            place[...] = values


def shard_path(prefix: str, number: int, count: int) -> str:
    """The name of a shard."""
    return f"{prefix}.data-{number:05d}-of-{count:05d}"


def read_index(path: str) -> tuple[list[str], list, int]:
    """Reads the `.index` file of a checkpoint."""
    msgpack = library("msgpack")
    if not os.path.isfile(path):
        raise ValueError(f"Expected the index of a checkpoint at {path}; received none")
    if os.path.getsize(path) > _LARGEST_INDEX:
        raise ValueError(
            f"Expected an index of at most {_LARGEST_INDEX} bytes at {path}; "
            f"received: {os.path.getsize(path)} bytes"
        )

    def extension(code, data):
        if code != _INDEX_INFO:
            raise ValueError(
                f"Expected entries of msgpack type {_INDEX_INFO} in {path}; "
                f"received: type {code}"
            )
        return _index_info(data, path)

    try:
        content = msgpack.unpackb(Path(path).read_bytes(), ext_hook=extension)
        tree, count = content["index"], content["shard_count"]
        version = content.get("version")
        if not isinstance(tree, dict) or not isinstance(count, int):
            raise TypeError("no dict of tensors")
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise _foreign(path, error) from error
    except (KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise _foreign(path, error) from error
    if version not in _VERSIONS:
        raise ValueError(
            f"Expected a version of {_VERSIONS} in {path}; received: {version!r}"
        )
    if not 0 < count < 100_000:
        raise ValueError(
            f"Expected a number of shards in {path}; received: shard_count={count}"
        )
    entries = list(_leaves(tree, (), path))
    for name, (info, slices, shards) in entries:
        check_dtype(info.dtype, name, path)
        if len(slices) != len(shards) or not all(
            isinstance(shard, int) and 0 <= shard < count for shard in shards
        ):
            raise ValueError(
                f"Expected a shard below {count} for each slice of {name!r} in {path}; "
                f"received: shards={list(shards)} for {len(slices)} slices"
            )
    return [name for name, _ in entries], [entry for _, entry in entries], count


def _foreign(path, error):
    return ValueError(
        f"Expected the index of a V-MoE checkpoint at {path}; received: "
        f"{type(error).__name__}: {error}. The file is truncated or of another kind."
    )


def _leaves(tree, path, file):
    """Names and entries as JAX flattens them: keys sorted as strings."""
    if not all(isinstance(key, str) for key in tree):
        raise ValueError(
            f"Expected names as keys of {'/'.join(path) or 'the index'!r} in {file}; "
            f"received: {list(tree)[:5]}"
        )
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key), file)
        elif isinstance(value, tuple) and isinstance(value[0], TensorInfo):
            yield "/".join((*path, key)), value
        elif value is not None:
            raise ValueError(
                f"Expected an entry of msgpack type {_INDEX_INFO} for "
                f"{'/'.join((*path, key))!r} in {file}; received: {value!r}"
            )


def _index_info(data, path):
    """`TensorInfo`, slices and shards of an entry of the index."""
    msgpack = library("msgpack")
    shaped, slices, shards = msgpack.unpackb(data, ext_hook=_no_extension)
    shape, dtype, *_ = msgpack.unpackb(shaped, ext_hook=_no_extension)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(
            f"Expected sizes of at least 0 in {path}; received: shape={shape}"
        )
    slices = [_bounds(packed, path) for packed in slices]
    return TensorInfo(tuple(shape), dtype, path), slices, tuple(shards)


def _bounds(packed, where):
    """(start, stop) per axis of a packed slice."""
    msgpack = library("msgpack")
    try:
        bounds = []
        for part in msgpack.unpackb(packed, ext_hook=_no_extension):
            start, stop, step = msgpack.unpackb(part, ext_hook=_no_extension)
            if step not in (None, 1) or not 0 <= start <= stop:
                raise ValueError(f"slice({start}, {stop}, {step})")
            bounds.append((start, stop))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(
            f"Expected slices of step 1 in {where}; received: {error}"
        ) from error
    return tuple(bounds)


def _no_extension(code, data):
    raise ValueError(f"an entry of msgpack type {code}")


def _size(shape):
    return int(np.prod(shape, dtype="int64"))
