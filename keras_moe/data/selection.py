"""Which examples of a split to use: exclusion, unreadable images."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import write_json
from keras_moe.data._examples import Examples
from keras_moe.data._files import read_json
from keras_moe.data._packages import tf
from keras_moe.data.reading import attempt
from keras_moe.data.sources import open_source

UNREADABLE = ("raise", "exclude")
_SCHEMA = {"split": str, "source": str, "count": int, "indices": [int]}


def write_exclusion(
    path: str | os.PathLike,
    source: str,
    split: str,
    count: int,
    indices: Sequence[int] | np.ndarray,
    **notes: Any,
) -> None:
    """Writes a file of examples to leave out, for `exclude` of `keras_moe.data.load`.

    Args:
        path: path of the JSON file.
        source: a source of `keras_moe.data.load`.
        split: a split of the source.
        count: number of all examples of the split.
        indices: indices to leave out, for example from `find_unreadable`.
        **notes: further JSON data, such as how examples were chosen.

    Example:

    >>> from keras_moe.data import find_unreadable, num_examples, write_exclusion
    >>> count, bad = num_examples("digits", "test"), find_unreadable("digits", "test")
    >>> write_exclusion("unreadable.json", "digits", "test", count, bad)
    >>> num_examples("digits", "test", exclude="unreadable.json")
    450
    """
    about = {"source": source, "split": split, "count": count, **notes}
    write_json(Path(path), {**about, "indices": np.asarray(indices).tolist()})


def find_unreadable(source: str, split: str, data_dir: str | None = None) -> np.ndarray:
    """Returns sorted indices of images that cannot be decoded, int64, by reading all.

    Args:
        source: see `keras_moe.data.load`, also for `split` and `data_dir`.

    Example:

    >>> from keras_moe.data import find_unreadable
    >>> len(find_unreadable("digits", "test"))
    0
    """
    examples = open_source(source, split, data_dir)
    return np.array([index for index, _ in _unreadable(examples)], "int64")


def left_out(
    examples: Examples, split: str, exclude: Any, unreadable: str
) -> np.ndarray:
    """Returns the sorted indices that `exclude` and `unreadable` leave out."""
    check_one_of("unreadable", unreadable, UNREADABLE)
    indices = without_captions(examples, split, exclude, unreadable)
    if unreadable == "raise":
        return indices
    rest = examples.without(indices)
    bad = _unreadable(rest)
    if not bad:
        return indices
    names = ", ".join(os.fsdecode(location) for _, location in bad[:5])
    message = (
        f"{len(bad)} of {rest.count} images of {examples.name!r}, split={split!r} "
        f"cannot be read and are left out: {names}"
    )
    if len(bad) == rest.count:
        raise ValueError(f"Expected images that can be read; received: {message}")
    # A fixed location makes Python show the warning once for several calls.
    warnings.warn(message, stacklevel=1)
    left = np.delete(np.arange(examples.count), indices)
    return np.union1d(indices, left[[index for index, _ in bad]])


def without_captions(
    examples: Examples, split: str, exclude: Any, unreadable: str
) -> np.ndarray:
    """Returns sorted indices of `exclude` and of examples with unusable captions."""
    source, count = examples.name, examples.count
    indices = excluded_indices(exclude, source, split, count)
    info = examples.captions
    faults = sorted({*info.faults} - {*indices.tolist()})
    if not faults:
        return indices
    message = (
        f"{len(faults)} of {count} images of {source!r}, split={split!r} have no image "
        f"or no usable caption: {'; '.join(info.faults[i] for i in faults[:5])}"
    )
    if unreadable == "raise" or len(faults) + len(indices) == count:
        raise unfit('images with captions, or unreadable="exclude" with some', message)
    warnings.warn(message, stacklevel=1)
    return np.union1d(indices, np.array(faults, "int64"))


def excluded_indices(exclude: Any, source: str, split: str, count: int) -> np.ndarray:
    """Returns the sorted unique indices of `exclude`, an argument of `load`."""
    files = [exclude] if isinstance(exclude, (str, os.PathLike)) else exclude
    is_list = isinstance(files, (list, tuple)) and files
    if is_list and isinstance(files[0], (str, os.PathLike)):
        parts = [_read_indices(Path(file), source, split, count) for file in files]
        exclude = [index for part in parts for index in part]
    indices = np.asarray(exclude)
    if not indices.size:
        return np.zeros(0, "int64")
    unique = np.unique(indices if indices.dtype.kind in "iu" else [])
    if (
        indices.ndim != 1
        or not 0 < len(unique) < count
        or not 0 <= unique[0] <= unique[-1] < count
    ):
        raise unfit(f"indices of some of {count} examples", f"exclude={exclude!r:.100}")
    return unique.astype("int64")


def _read_indices(path: Path, source: str, split: str, count: int) -> list[int]:
    """Reads the indices of a file of `write_exclusion`, if it is for this split."""
    content = read_json(path, _SCHEMA, ("split", "count", "indices"), others=True)
    own = str(content.get("source", source))
    # Folders and record files may have moved.
    kind = source.partition(":")[0]
    is_moved = kind in ("folder", "tfrecord") and own.startswith(f"{kind}:")
    same = (content["split"], content["count"]) == (split, count)
    if not same or not (own == source or is_moved):
        raise ValueError(
            f"Expected {path} to be of split={split!r} with {count} examples of "
            f"{source!r}; received: split={content['split']!r}, "
            f"count={content['count']!r}, source={own!r}"
        )
    return content["indices"]


def _unreadable(examples: Examples) -> list[tuple[int, bytes]]:
    location = examples.location
    if location is None:
        return []

    def checked(position, item):
        def readable(item):
            # Depends on the pixels, which would not be decoded otherwise.
            return tf.size(examples.decode(examples.read(item)["image"])) > 0

        is_good = attempt(readable, item, lambda *_: tf.constant(False))
        return position, location(item), is_good

    bad = []
    for columns in examples.scan(checked):
        rows = zip(*columns)
        bad += [(int(index), where) for index, where, good in rows if not good]
    return bad
