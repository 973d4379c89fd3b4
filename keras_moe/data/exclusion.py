"""Examples that are left out of a data set, by their indices."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.json_files import read_json


def excluded_indices(exclude: Any, source: str, split: str, count: int) -> np.ndarray:
    """The indices that `exclude` of `load` says, sorted and each once.

    Raises:
        ValueError: if they are not of this split, or leave nothing over.
    """
    if isinstance(exclude, (str, os.PathLike)):
        found = read_json(Path(exclude))
        same = found.get("split") == split and found.get("count") == count
        if not same or not _may_be(source, found.get("source", source)):
            raise ValueError(
                f"Expected {exclude} to be of split={split!r} with {count} examples of "
                f"{source!r}; received: split={found.get('split')!r}, "
                f"count={found.get('count')!r}, source={found.get('source')!r}"
            )
        exclude = found.get("indices")
    indices = np.asarray(exclude if exclude is not None else [0.5])
    if not indices.size:
        return np.zeros(0, "int64")
    if (
        indices.ndim != 1
        or not np.issubdtype(indices.dtype, np.integer)
        or not 0 <= indices.min() <= indices.max() < count
        or len(np.unique(indices)) == count
    ):
        raise ValueError(
            f"Expected indices of some of {count} examples; "
            f"received: exclude={exclude!r:.100}"
        )
    return np.unique(indices).astype("int64")


def _may_be(source, other):
    """Whether these may be one data set: folders may have moved, names may not."""
    kinds = [str(name).partition(":")[0] for name in (source, other)]
    return kinds[0] == kinds[1] and (
        kinds[0] in ("folder", "tfrecord") or source == other
    )
