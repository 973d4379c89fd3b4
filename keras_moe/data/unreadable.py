"""Images that cannot be read, for a search before training."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_moe.data import folders, tfrecord
from keras_moe.data.examples import Examples, Share
from keras_moe.data.exclusion import excluded_indices
from keras_moe.data.reading import attempt, reading_errors
from keras_moe.data.sources import open_source

UNREADABLE = ("raise", "exclude")


def find_unreadable(
    source: str,
    split: str,
    data_dir: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> np.ndarray:
    """Finds the images of a split that cannot be read or decoded, by reading all.

    Args:
        source: name of a source of `keras_moe.data.load`.
        split: name of a split.
        data_dir: folder of TensorFlow Datasets.
        progress: function that is called with the number of images that are done, and
            the number of all images.

    Returns:
        Sorted indices, int64: for `exclude` of `keras_moe.data.load`, or for
        `write_exclusion`.

    Raises:
        ValueError: if the source or the split is not known, or a TFRecord file cannot
            be read to its end; see `find_corrupt_files`.

    Example:

    >>> from keras_moe.data import find_unreadable
    >>> len(find_unreadable("digits", "test"))
    0
    """
    examples = open_source(source, split, data_dir)
    return np.array([index for index, _ in _unreadable(examples, progress)], "int64")


def find_corrupt_files(source: str) -> list[str]:
    """The files of a source that cannot be read.

    It reads all of them: images are decoded, and TFRecord files are read to their end.
    Missing images that a `labels.json` names count, too; splits without images do not
    matter. `find_unreadable` is for the images within TFRecord files.

    Args:
        source: `"folder:PATH"`, `"tfrecord:GLOB"`, or a folder or glob of TFRecord
            files.

    Raises:
        ValueError: if there are no such files.

    Example:

    ```python
    find_corrupt_files("folder:photos")
    find_corrupt_files("photos/train-*.tfrecord")
    ```
    """
    kind, _, path = source.partition(":")
    if kind == "folder":
        examples, paths = folders.read_files(path)
        if examples is not None:
            paths += [_text(place) for _, place in _unreadable(examples)]
        return sorted(paths)
    return tfrecord.corrupt_files(path if kind == "tfrecord" else source)


def excluded_examples(
    source: str,
    split: str,
    data_dir: str | None = None,
    exclude: Any = (),
    unreadable: str = "raise",
) -> np.ndarray:
    """The examples that `load` leaves out, for several calls of it.

    Args:
        source: name of a source of `keras_moe.data.load`.
        split: name of a split.
        data_dir: folder of TensorFlow Datasets.
        exclude: examples to leave out; see `LoadOptions`.
        unreadable: treatment of images that cannot be read; see `LoadOptions`.

    Returns:
        Sorted indices, int64, which `exclude` takes in the place of both arguments.

    Raises:
        ValueError: if an argument is not known or out of range.

    Example:

    >>> from keras_moe.data import excluded_examples
    >>> excluded_examples("digits", "test", exclude=[7, 3]).tolist()
    [3, 7]
    """
    examples = open_source(source, split, data_dir)
    return left_out(examples, source, split, exclude, unreadable)


def left_out(
    examples: Examples, source: str, split: str, exclude: Any, unreadable: str
) -> np.ndarray:
    """`excluded_examples` of a source that is open."""
    check_unreadable(unreadable)
    excluded = excluded_indices(exclude, source, split, examples.count)
    if unreadable == "raise":
        return excluded
    bad = _unreadable(examples)
    if not bad:
        return excluded
    names = ", ".join(_text(place) for _, place in bad[:5])
    message = (
        f"{len(bad)} of {examples.count} images of {source!r}, split={split!r} "
        f"cannot be read and are left out: {names}{', ...' if len(bad) > 5 else ''}"
    )
    # The warning has one place, whoever calls: Python shows it once for several calls.
    warnings.warn(message, stacklevel=1)
    if len(bad) == examples.count:
        raise ValueError(
            f"Expected images that can be read in {source!r}, split={split!r}; "
            f"received: {examples.count} that cannot, such as {names}"
        )
    indices = [*excluded.tolist(), *(int(index) for index, _ in bad)]
    return excluded_indices(indices, source, split, examples.count)


def check_unreadable(unreadable: str) -> None:
    """Raises ValueError unless a treatment of images is known."""
    if unreadable not in UNREADABLE:
        raise ValueError(
            f"Expected one of {UNREADABLE}; received: unreadable={unreadable!r}"
        )


def _text(place: bytes) -> str:
    return place.decode(errors="surrogateescape")


def _unreadable(
    examples: Examples, progress: Callable | None = None
) -> list[tuple[int, bytes]]:
    """Positions and places of the images that cannot be read."""
    import tensorflow as tf

    if examples.place is None:
        return []

    def checked(position, item):
        def readable(item):
            # The result depends on the pixels, which would not be decoded otherwise.
            return tf.size(examples.decode(examples.read(item)[0])) > 0

        is_good = attempt(readable, item, lambda *_: tf.constant(False))
        return position, examples.place(item), is_good

    dataset = examples.pass_over(Share(0, 1, 1), None, 0, None)
    dataset = dataset.map(checked, num_parallel_calls=tf.data.AUTOTUNE)
    bad, done = [], 0
    with reading_errors():
        for columns in dataset.batch(256).prefetch(1).as_numpy_iterator():
            bad += [(index, place) for index, place, good in zip(*columns) if not good]
            done += len(columns[0])
            if progress is not None:
                progress(done, examples.count)
    return bad
