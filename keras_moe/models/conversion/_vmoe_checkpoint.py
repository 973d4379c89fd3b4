"""Reads V-MoE checkpoints: an index and shards, both msgpack with Flax's types.

`<prefix>.index` lists each tensor's shape, slices and the shard of each slice.
`<prefix>.data-0000i-of-0000N` maps a tensor's number (its index among the names sorted
level by level) to pairs of flat pieces and a slice.
"""

import itertools
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_moe.models.conversion._readers import (
    PublishedTensors,
    TensorInfo,
    check_dtype,
    from_bfloat16,
)

# msgpack extension types: Flax's, and those of the release.
_NDARRAY, _NPSCALAR = 1, 3
_SLICE_ND, _INDEX_INFO = 6, 8
_MAGIC = "__msgpack_array_chunk_a87ca2__"
_VERSIONS = (None, "20220622")
# About a million slices of 100 bytes.
_LARGEST_INDEX = 1 << 27


class _Chunk(NamedTuple):
    """A slice of a tensor: bounds per axis, and (offset, bytes) of its pieces."""

    bounds: tuple[tuple[int, int], ...]
    shard: int
    pieces: list[tuple[int, int]]


class VMoECheckpoint(PublishedTensors):
    """The tensors of a V-MoE checkpoint.

    Opening it reads the index and the shards' headers; values are read on demand.
    """

    def __init__(self, prefix: str | os.PathLike):
        prefix = str(prefix).removesuffix(".index")
        names, self._stored, count = read_vmoe_index(f"{prefix}.index")
        self.shards = [shard_path(prefix, i, count) for i in range(count)]
        for path in self.shards:
            if not os.path.isfile(path):
                raise ValueError(
                    f"Expected {count} shards beside {prefix}.index; received: no "
                    f"{path}"
                )
        super().__init__(prefix, {})
        for name, (info, _, shards) in zip(names, self._stored):
            file = self.shards[shards[0]] if shards else prefix
            self._tensors[name] = info._replace(file=file)
        declared = sum(info.nbytes for info in self.values())
        stored = sum(os.path.getsize(path) for path in self.shards)
        if declared > stored:
            raise ValueError(
                f"Expected shards of at least {declared} bytes, the sizes that "
                f"{prefix}.index declares; received: {stored} bytes. A shard "
                "is truncated, or the index belongs to another checkpoint."
            )
        self._numbers = {name: number for number, name in enumerate(names)}
        self._chunks = [[] for _ in names]
        for shard in range(count):
            self._scan(shard, names)
        for name, number in self._numbers.items():
            self._check_listed(name, number)
            self._check_filled(name, number)

    def _scan(self, shard, names):
        """Finds the byte ranges of each chunk in a shard without reading them."""
        path = self.shards[shard]
        with open(path, "rb", buffering=512) as stream:
            headers = _Headers(stream, path)
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
                number = int(key)
                headers.name = names[number]
                dtype = self._stored[number][0].dtype
                for _ in range(headers.size("array")):
                    headers.expect_pair()
                    pieces = [
                        headers.piece(dtype) for _ in range(headers.size("array"))
                    ]
                    bounds = _bounds(headers.extension(_SLICE_ND), headers.where)
                    self._chunks[number].append(_Chunk(bounds, shard, pieces))
            headers.expect_end()

    def _check_listed(self, name, number):
        """Raises ValueError if a tensor's chunks differ from the index."""
        _, slices, shards = self._stored[number]
        received = sorted((chunk.bounds, chunk.shard) for chunk in self._chunks[number])
        expected = sorted(zip(slices, shards))
        if received != expected:
            lost = [x for x in expected if x not in received]
            bounds, shard = lost[0] if lost else received[0]
            raise ValueError(
                f"Expected the slices of {name!r} that {self.path}.index lists; "
                f"received: {'no' if lost else 'another'} slice {bounds} in "
                f"{self.shards[shard]}"
            )

    def _check_filled(self, name, number):
        """Raises ValueError unless chunks exactly fill the tensor."""
        info, chunks = self._stored[number][0], self._chunks[number]
        itemsize = info.nbytes // max(math.prod(info.shape), 1)
        filled = 0
        for chunk in chunks:
            size = math.prod(stop - start for start, stop in chunk.bounds)
            filled += size
            is_inside = len(chunk.bounds) == len(info.shape) and all(
                0 <= start <= stop <= n
                for (start, stop), n in zip(chunk.bounds, info.shape)
            )
            stored = sum(length for _, length in chunk.pieces)
            if not is_inside or stored != size * itemsize:
                raise ValueError(
                    f"Expected {size * itemsize} bytes for the slice {chunk.bounds} of "
                    f"{name!r} with shape {info.shape} in {self.shards[chunk.shard]}; "
                    f"received: {stored} bytes"
                )
        overlap = any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(x.bounds, y.bounds))
            for x, y in itertools.combinations(chunks, 2)
        )
        if filled != math.prod(info.shape) or overlap:
            raise ValueError(
                f"Expected slices that fill {name!r} with shape {info.shape} once in "
                f"{self.path}.index; received: {filled} values in {len(chunks)} "
                "slices"
            )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        dtype = "<u2" if info.dtype == "bfloat16" else np.dtype(info.dtype)
        array = np.empty(info.shape, dtype)
        for shard, chunks in itertools.groupby(
            self._chunks[self._numbers[name]], lambda chunk: chunk.shard
        ):
            with open(self.shards[shard], "rb") as stream:
                for chunk in chunks:
                    self._read_chunk(stream, chunk, array, name)
        if info.dtype == "bfloat16":
            array = from_bfloat16(array)
        return array if rows is None else array[rows]

    def _read_chunk(self, stream, chunk, array, name):
        # The ellipsis gives a view even of a scalar.
        part = array[(..., *(slice(*bounds) for bounds in chunk.bounds))]
        # No copy if the part is contiguous.
        direct = part.flags.c_contiguous
        values = part if direct else np.empty(part.shape, array.dtype)
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
            part[...] = values


def shard_path(prefix: str, number: int, count: int) -> str:
    return f"{prefix}.data-{number:05d}-of-{count:05d}"


def read_vmoe_index(path: str) -> tuple[list[str], list[tuple], int]:
    """Returns names, (info, slices, shards) of each, and the number of shards."""
    if not os.path.isfile(path):
        raise ValueError(f"Expected the index of a checkpoint at {path}; received none")
    if os.path.getsize(path) > _LARGEST_INDEX:
        raise ValueError(
            f"Expected an index of at most {_LARGEST_INDEX} bytes at {path}; "
            f"received: {os.path.getsize(path)} bytes"
        )
    content = _unpacked_index(path)
    version, count = content.get("version"), content["shard_count"]
    if version not in _VERSIONS:
        raise ValueError(
            f"Expected a version of {_VERSIONS} in {path}; received: {version!r}"
        )
    if not 0 < count < 100_000:
        raise ValueError(
            f"Expected a number of shards in {path}; received: shard_count={count}"
        )
    entries = list(_leaves(content["index"], (), path))
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


def _unpacked_index(path):
    msgpack = _msgpack()

    def extension(code, data):
        if code != _INDEX_INFO:
            raise ValueError(
                f"Expected entries of msgpack type {_INDEX_INFO} in {path}; "
                f"received: type {code}"
            )
        return _index_info(data, path)

    try:
        content = msgpack.unpackb(Path(path).read_bytes(), ext_hook=extension)
        if not isinstance(content["index"], dict):
            raise TypeError("no dict of tensors")
        if not isinstance(content["shard_count"], int):
            raise TypeError("no dict of tensors")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        msgpack.UnpackException,
    ) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"Expected the index of a V-MoE checkpoint at {path}; received: "
            f"{type(error).__name__}: {error}. The file is truncated or has another "
            "format."
        ) from error
    return content


def _msgpack():
    """Imports msgpack, which only these checkpoints need."""
    try:
        import msgpack
    except ImportError as error:
        raise ImportError(
            "Reading this checkpoint needs the package msgpack: "
            "pip install 'keras-moe[convert]'"
        ) from error
    return msgpack


def _leaves(tree, path, file):
    """Yields names and entries in JAX's order: keys sorted as strings."""
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
    """Returns `TensorInfo`, slices and shards of an index entry."""
    shaped, slices, shards = _unpacked(data)
    shape, dtype, *_ = _unpacked(shaped)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(
            f"Expected sizes of at least 0 in {path}; received: shape={shape}"
        )
    slices = [_bounds(packed, path) for packed in slices]
    return TensorInfo(tuple(shape), dtype, path), slices, tuple(shards)


def _bounds(packed, where):
    """Returns (start, stop) per axis of a packed slice."""
    msgpack = _msgpack()
    try:
        bounds = []
        for part in _unpacked(packed):
            start, stop, step = _unpacked(part)
            if step not in (None, 1) or not 0 <= start <= stop:
                raise ValueError(f"slice({start}, {stop}, {step})")
            bounds.append((start, stop))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(
            f"Expected slices of step 1 in {where}; received: {error}"
        ) from error
    return tuple(bounds)


def _unpacked(data):
    def refuse(code, data):
        raise ValueError(f"an entry of msgpack type {code}")

    return _msgpack().unpackb(data, ext_hook=refuse)


class _Headers:
    """Reads msgpack headers of a stream and skips the values between them.

    msgpack's own reader would load each piece, up to a GiB, to skip it.
    """

    def __init__(self, stream, path):
        self._stream, self._path, self.name = stream, path, None
        self._end = os.fstat(stream.fileno()).st_size

    @property
    def where(self):
        return f"{self._path}, {self.name!r}" if self.name else str(self._path)

    def _wrong(self, expected, byte):
        return ValueError(
            f"Expected {expected} at byte {self._stream.tell() - 1} of {self.where}; "
            f"received: msgpack byte 0x{byte:02x}"
        )

    def _take(self, count):
        data = self._stream.read(count)
        if len(data) < count:
            raise ValueError(
                f"Expected more bytes in {self.where}; received its end: the file is "
                "truncated"
            )
        return data

    def _integer(self, width):
        return int.from_bytes(self._take(width), "big")

    def _length(self, expected, small, mask, wide):
        """Reads a length, from the byte itself or the bytes after it."""
        byte = self._take(1)[0]
        if small is not None and byte & mask == small:
            return byte & ~mask & 0xFF
        if byte in wide:
            return self._integer(wide[byte])
        raise self._wrong(expected, byte)

    def size(self, kind):
        """Reads the number of entries of a map or an array."""
        small, wide = {"map": (0x80, 0xDE), "array": (0x90, 0xDC)}[kind]
        return self._length(f"msgpack's {kind}", small, 0xF0, {wide: 2, wide + 1: 4})

    def text(self):
        length = self._length("a name", 0xA0, 0xE0, {0xD9: 1, 0xDA: 2, 0xDB: 4})
        if length > 1000:
            raise ValueError(
                f"Expected short names in {self.where}; received: {length} bytes"
            )
        return self._take(length).decode("utf-8", "replace")

    def skip_bool(self):
        byte = self._take(1)[0]
        if byte not in (0xC2, 0xC3):
            raise self._wrong("a bool", byte)

    def expect_pair(self):
        if self.size("array") != 2:
            raise ValueError(
                f"Expected pairs of pieces and slice in {self.where}; received others"
            )

    def _extension_end(self, codes):
        """Returns the end of the extension data that starts here."""
        byte = self._take(1)[0]
        fixed = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
        wide = {0xC7: 1, 0xC8: 2, 0xC9: 4}
        if byte in fixed:
            length = fixed[byte]
        elif byte in wide:
            length = self._integer(wide[byte])
        else:
            raise self._wrong("an extension", byte)
        code = int.from_bytes(self._take(1), "big", signed=True)
        if code not in codes:
            raise ValueError(
                f"Expected a msgpack extension of type {codes} in {self.where}; "
                f"received: type {code}"
            )
        end = self._stream.tell() + length
        if end > self._end:
            raise ValueError(
                f"Expected {length} bytes at {end - length} of {self.where}; "
                f"received: {self._end} bytes in all: the file is truncated"
            )
        return end

    def extension(self, code):
        """Reads the data of a small extension."""
        end = self._extension_end((code,))
        return self._take(end - self._stream.tell())

    def piece(self, dtype):
        """Returns offset and length of an array's bytes, and skips them."""
        end = self._extension_end((_NDARRAY, _NPSCALAR))
        if self.size("array") != 3:
            raise ValueError(
                f"Expected (shape, dtype, bytes) in {self.where}; received another "
                "array"
            )
        for _ in range(self.size("array")):
            self._skip_integer()
        received = self.text()
        if received != dtype:
            raise ValueError(
                f"Expected values of {dtype} in {self.where}; received: {received}"
            )
        length = self._length("bytes", None, 0, {0xC4: 1, 0xC5: 2, 0xC6: 4})
        start = self._stream.tell()
        if start + length != end:
            raise ValueError(
                f"Expected {end - start} bytes at {start} of {self.where}; "
                f"received: {length}"
            )
        self._stream.seek(end)
        return start, length

    def _skip_integer(self):
        byte = self._take(1)[0]
        if byte < 0x80:
            return
        if not 0xCC <= byte <= 0xCF:
            raise self._wrong("a size", byte)
        self._integer(1 << (byte - 0xCC))

    def expect_end(self):
        """Raises ValueError if bytes follow the last value."""
        if self._stream.tell() != self._end:
            raise ValueError(
                f"Expected the end of {self._path} at byte {self._stream.tell()}; "
                f"received: {self._end} bytes"
            )
