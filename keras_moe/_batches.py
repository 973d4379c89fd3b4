"""Data that are arrays, or an iterable of batches; examples drawn from them."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_moe._checks import unfit


def progress_bar(total: int | None, verbose: str | int, unit: str) -> Any:
    """A bar as in `fit`: 0 for none, 1 or "auto" for a bar, 2 for a line at the end."""
    verbose = 1 if verbose == "auto" else int(verbose)
    return keras.utils.Progbar(total, verbose=verbose, unit_name=unit)


def is_arrays(data: object) -> bool:
    """Returns whether data are an array or a dict, or a tuple that begins with one."""
    # A list has batches.
    first = data[0] if isinstance(data, tuple) and len(data) > 1 else data
    return isinstance(first, dict) or hasattr(first, "shape")


def array_length(data: Any, name: str = "arrays") -> int:
    """Returns the number of examples of arrays, which must agree."""
    sizes = set(_lengths(data))
    if len(sizes) > 1:
        raise unfit(f"{name} of one length", f"lengths {sorted(sizes)}")
    return min(sizes, default=0)


def _lengths(data):
    if isinstance(data, (dict, tuple)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _lengths(part)
    elif data is not None:
        yield len(data)


def _rows(data, rows):
    """Slices all arrays alike; lists are arrays, too."""
    if isinstance(data, tuple):
        return tuple(_rows(part, rows) for part in data)
    if isinstance(data, dict):
        return {name: _rows(part, rows) for name, part in data.items()}
    return None if data is None else data[rows]


def read_batches(
    data: Any, batch_size: int, name: str, may_be_endless: bool = False
) -> tuple[Iterator[Any], int | None]:
    """Returns one pass over the batches of data, and their number if it is known."""
    if is_arrays(data):
        starts = range(0, array_length(data, name), batch_size)
        return (_rows(data, slice(i, i + batch_size)) for i in starts), len(starts)
    return read_iterable(data, name, may_be_endless)


def read_iterable(
    data: Any, name: str, may_be_endless: bool = False
) -> tuple[Iterator[Any], int | None]:
    """Returns one pass over batches, and their number if it is known."""
    if isinstance(data, keras.utils.PyDataset):
        return (data[i] for i in range(data.num_batches)), data.num_batches
    # The cardinality is -1 for infinite datasets and -2 if unknown.
    if hasattr(data, "cardinality"):
        length = int(data.cardinality())
    else:
        length = len(data) if hasattr(data, "__len__") else -2
    if length == -1 and not may_be_endless:
        raise unfit(f"{name} to end", "a data set that repeats for ever")
    return iter(data), length if length >= 0 else None


def stratified(labels: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Draws sorted indices: one of each label, if they are enough, then equal parts."""
    order = np.random.default_rng(seed).permutation(len(labels))
    _, own, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    # The rank of each example among those of its label, as a fraction of these.
    ranks = np.empty(len(order))
    starts = np.cumsum(counts) - counts
    ranks[np.argsort(own, kind="stable")] = np.arange(len(order))
    ranks = (ranks - starts[own]) / counts[own]
    return np.sort(order[np.argsort(ranks, kind="stable")[:number]])
