"""Examples that are left out of a data set, by their indices."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.json_schema import Integer, ListOf, Record, Text, read_json
from keras_moe.files import write_json

_FILE = Record(
    {
        "split": Text(),
        "source": Text(),
        "count": Integer(0, 2**63 - 1),
        "indices": ListOf(Integer(0, 2**63 - 1)),
    },
    required=("split", "count", "indices"),
    others=True,
)


def write_exclusion(
    path: str | os.PathLike,
    source: str,
    split: str,
    count: int,
    indices: Any,
    **notes: Any,
) -> None:
    """Writes a file of examples to leave out, for `exclude` of `keras_moe.data.load`.

    Args:
        path: path of the JSON file.
        source: name of a source of `keras_moe.data.load`.
        split: name of a split of the source.
        count: number of all examples of the split.
        indices: indices of the examples to leave out, such as `find_unreadable`
            returns.
        **notes: further entries of the file, such as the way the examples were chosen;
            JSON-serialisable.

    Example:

    >>> from keras_moe.data import find_unreadable, num_examples, write_exclusion
    >>> count, bad = num_examples("digits", "test"), find_unreadable("digits", "test")
    >>> write_exclusion("unreadable.json", "digits", "test", count, bad)
    >>> num_examples("digits", "test", exclude="unreadable.json")
    450
    """
    about = {"source": source, "split": split, "count": count, **notes}
    write_json(Path(path), {**about, "indices": np.asarray(indices).tolist()})


def excluded_indices(exclude: Any, source: str, split: str, count: int) -> np.ndarray:
    """The indices of `exclude`, an argument of `load`, sorted and each once."""
    what = f"exclude={exclude!r:.100}"
    files = [exclude] if isinstance(exclude, (str, os.PathLike)) else exclude
    is_list = isinstance(files, (list, tuple)) and files
    if is_list and all(isinstance(file, (str, os.PathLike)) for file in files):
        exclude = [i for file in files for i in _indices(file, source, split, count)]
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
            f"Expected indices of some of {count} examples; received: {what}"
        )
    return np.unique(indices).astype("int64")


def _indices(path, source, split, count) -> list[int]:
    """The indices in a file, if it is for this split."""
    content = read_json(Path(path), _FILE)
    same = content["split"] == split and content["count"] == count
    if not same or not _may_be(source, content.get("source", source)):
        raise ValueError(
            f"Expected {path} to be of split={split!r} with {count} examples of "
            f"{source!r}; received: split={content['split']!r}, "
            f"count={content['count']!r}, source={content.get('source')!r}"
        )
    return content["indices"]


def _may_be(source, other):
    """Whether two names may be of one data set: folders may have moved."""
    kinds = [str(name).partition(":")[0] for name in (source, other)]
    return kinds[0] == kinds[1] and (
        kinds[0] in ("folder", "tfrecord") or source == other
    )
