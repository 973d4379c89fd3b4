"""The pieces of variables in safetensors files: one for each device that has one.

A piece is named `GROUP/INDEX/PATH@START`, as `model/00003/head/kernel@0,768`: the
index is that of the variable in its group, the start that of the piece in the variable.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from keras_moe.training.tensor_writer import Tensor


class Piece(NamedTuple):
    """A piece of a variable in a file.

    Attributes:
        start: index of its first element in the variable.
        shape: its shape.
        file: the open file.
        name: its name in the file.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: Any
    name: str

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """A part of the piece."""
        # The package slices neither scalars nor what is empty.
        if 0 in self.shape or not self.shape:
            return self.file.get_tensor(self.name)[part]
        return self.file.get_slice(self.name)[part]


def is_sharded(value: Any) -> bool:
    """Whether a value may lie on several devices, as any array of JAX."""
    # A question of its class: to read the shards may fail.
    return hasattr(type(value), "addressable_shards")


def pieces_to_write(name: str, variable: keras.Variable) -> list[Tensor]:
    """The pieces of a variable that this process is to write."""
    if not is_sharded(variable.value):

        def whole():
            return keras.ops.convert_to_numpy(variable.value)

        start = ",".join("0" * len(variable.shape))
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return [Tensor(f"{name}@{start}", tuple(variable.shape), dtype, whole)]
    from keras_moe.ops.kernels.sharded_arrays_jax import with_shards

    tensors = []
    for shard in with_shards(variable.value).addressable_shards:
        # One of the copies on several devices is written.
        if shard.replica_id == 0:
            start = ",".join(str(part.start or 0) for part in shard.index)
            tensors.append(
                Tensor(
                    f"{name}@{start}",
                    shard.data.shape,
                    str(shard.data.dtype),
                    lambda shard=shard: np.asarray(shard.data),
                )
            )
    return tensors


@contextlib.contextmanager
def opened_pieces(
    paths: Sequence[Path],
) -> Iterator[dict[tuple[str, int], list[Piece]]]:
    """The pieces in files by group and index of their variable."""
    pieces: dict[tuple[str, int], list[Piece]] = {}
    with contextlib.ExitStack() as files:
        for path in paths:
            try:
                file = files.enter_context(safe_open(path, framework="np"))
                for name in file.keys():  # noqa: SIM118
                    group, index, rest = name.split("/", 2)
                    start = rest.rpartition("@")[2]
                    piece = Piece(
                        tuple(int(x) for x in start.split(",") if x),
                        tuple(file.get_slice(name).get_shape()),
                        file,
                        name,
                    )
                    pieces.setdefault((group, int(index)), []).append(piece)
            except (SafetensorError, ValueError) as error:
                raise ValueError(
                    f"Expected a safetensors file of a checkpoint; received: {path} "
                    f"({error})"
                ) from error
        yield pieces


def assign_pieces(
    variable: keras.Variable, pieces: Sequence[Piece], dtype: str
) -> None:
    """Gives a variable its value, of the pieces that this process needs."""
    value = variable.value

    def read(index):
        bounds = [part.indices(size) for part, size in zip(index, variable.shape)]
        return _region(pieces, [(start, stop) for start, stop, _ in bounds], dtype)

    if is_sharded(value):
        from keras_moe.ops.kernels.sharded_arrays_jax import place_like

        variable.assign(place_like(value, read))
    else:
        region = read((slice(None),) * len(variable.shape))
        # PyTorch takes no such arrays.
        is_bits = region.dtype.name.startswith("float8")
        variable.assign(region.astype("float32") if is_bits else region)


def _region(pieces, bounds, dtype):
    """A part of a variable, of the pieces that have something of it."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    region = np.empty([b - a for a, b in bounds], dtype)
    filled = 0
    for piece in pieces:
        start, shape = piece.start, piece.shape
        if len(start) != len(bounds) or len(shape) != len(bounds):
            raise ValueError(f"Expected {len(bounds)} axes; received: {piece.name}")
        low = [max(a, b) for a, (b, _) in zip(start, bounds)]
        high = [min(a + n, b) for a, n, (_, b) in zip(start, shape, bounds)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))
        there = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(low, high, bounds))
        values = piece.read(here)
        # Eight-bit floats are there as their bits.
        is_bits = dtype.name.startswith("float8") and values.dtype == np.uint8
        region[there] = values.view(dtype) if is_bits else values
        filled += region[there].size
    if filled != region.size:
        raise ValueError(
            f"Expected all of a variable; received: pieces {[x.name for x in pieces]}"
        )
    return region
