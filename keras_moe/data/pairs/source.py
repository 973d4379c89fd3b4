"""Images with their captions, as every source gives them.

Axes: K captions of an image, N tokens.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.examples import Examples, IndexedExamples
from keras_moe.data.exclusion import excluded_indices
from keras_moe.data.labels import Classes
from keras_moe.data.pairs.captions import (
    CaptionTable,
    checked_captions,
    select_caption,
)
from keras_moe.data.unreadable import check_unreadable, left_out


class PairSource(NamedTuple):
    """The images of a split with their captions."""

    name: str
    images: Examples
    captions: Sequence[tuple[str, ...]] | None = None
    counts: np.ndarray | None = None
    has_classes: bool = False
    faults: Mapping[int, str] = {}

    def without_text(self, split: str, exclude: Any, unreadable: str) -> np.ndarray:
        """Sorted numbers of `exclude`, and of the images or captions with faults."""
        check_unreadable(unreadable)
        count = self.images.count
        excluded = excluded_indices(exclude, self.name, split, count)
        faults = sorted({*self.faults} - {*excluded.tolist()})
        if not faults:
            return excluded
        place = f"{self.name!r}, split={split!r}"
        some = "; ".join(self.faults[index] for index in faults[:5])
        some += "; ..." if len(faults) > 5 else ""
        if unreadable == "raise" or len(faults) + len(excluded) == count:
            raise ValueError(
                f'Expected images with captions in {place}, or unreadable="exclude" '
                f"with some; received: {len(faults)} faults in {count} images: {some}"
            )
        warnings.warn(
            f"{len(faults)} of {count} images of {place} have no image or no usable "
            f"caption and are left out: {some}",
            stacklevel=1,
        )
        return np.union1d(excluded, np.array(faults, "int64"))

    def left_out(self, split: str, exclude: Any, unreadable: str) -> np.ndarray:
        """Sorted numbers of all images to leave out; see `without_text`."""
        excluded = self.without_text(split, exclude, unreadable)
        kept = np.delete(np.arange(self.images.count), excluded)
        images = self.images.without(excluded) if len(excluded) else self.images
        bad = left_out(images, self.name, split, (), unreadable)
        return np.union1d(excluded, kept[bad])

    def pairs(self, excluded: np.ndarray, every_caption: bool) -> Examples:
        """The examples to make batches of."""
        if every_caption:
            kept = np.delete(np.arange(self.images.count), excluded)
            return _every_caption(self.images, self.counts, kept)
        return self.images.without(excluded) if len(excluded) else self.images


def indexed_pairs(
    name: str,
    captions: Sequence[Any],
    read: Callable,
    decode: Callable,
    encoded_channels: int | None = None,
    place: Callable | None = None,
    places: Sequence[str] | None = None,
    faults: dict[int, str] | None = None,
) -> PairSource:
    """A source whose captions are in memory, and whose images can be read in
    any order.
    """
    checked, faults = [], dict(faults or {})
    for index, several in enumerate(captions):
        texts, fault = checked_captions(several)
        checked.append(texts)
        if fault is not None and index not in faults:
            image = f"image {index}" if places is None else places[index]
            faults[index] = f"{image} has {fault}"
    table = CaptionTable(checked)
    images = IndexedExamples(
        len(checked),
        lambda index: (read(index), table.texts(index, index)),
        decode,
        Classes(1),
        encoded_channels,
        place,
    )
    return PairSource(name, images, checked, table.counts, faults=faults)


def _every_caption(
    images: Examples, counts: np.ndarray, kept: np.ndarray
) -> IndexedExamples:
    """Examples of all captions of the images that are kept."""
    import tensorflow as tf

    counts = counts[kept]
    rows = np.repeat(np.arange(len(kept)), counts)
    which = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    image_of = tf.constant(kept[rows], "int64")
    which = tf.constant(which, "int64")

    def read(pair):
        stored, texts = images.read(image_of[pair])
        return stored, select_caption(texts, slice(which[pair], which[pair] + 1))

    return IndexedExamples(
        len(rows),
        read,
        images.decode,
        images.classes,
        images.encoded_channels,
        None if images.place is None else lambda pair: images.place(image_of[pair]),
    )
