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
        if found.get("split") != split or found.get("count") != count:
            raise ValueError(
                f"Expected {exclude} to be of split={split!r} with {count} examples of "
                f"{source!r}; received: split={found.get('split')!r}, "
                f"count={found.get('count')!r}"
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
