"""Which examples of a split to use: exclusion, unreadable images, duplicates.

A perceptual hash finds images that were resized, recompressed or brightened: its 64
bits say which low frequencies of the grey image are above their median.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import check_integer, check_one_of, unfit
from keras_moe._files import write_json
from keras_moe._types import OnProgress
from keras_moe.data._examples import Examples
from keras_moe.data._files import read_json
from keras_moe.data._packages import tf
from keras_moe.data.reading import attempt
from keras_moe.data.sources import open_source

UNREADABLE = ("raise", "exclude")
# Side of the image that the perceptual hash reads, and its number of frequencies.
_SIZE, _FREQUENCIES = 32, 8
# Standard deviation in grey levels below which there is no structure to compare.
_LEAST_DEVIATION = 2.0
# Number of distances to hold in memory.
_BLOCK = 1 << 22
_ONES_OF_16_BITS = np.array([bin(number).count("1") for number in range(1 << 16)], "u1")
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
    """Returns positions and locations of images that cannot be read or decoded."""
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


class ImageHashes(NamedTuple):
    """Hashes of the images of a split, in the order of the source.

    Attributes:
        exact: (N,) int64, hashes of shape and pixels.
        perceptual: (N,) uint64, hashes of low frequencies.
        has_structure: (N,) bool, False for one colour (`perceptual` is meaningless).
    """

    exact: np.ndarray
    perceptual: np.ndarray
    has_structure: np.ndarray


def image_hashes(
    source: str,
    split: str,
    data_dir: str | None = None,
    progress: OnProgress | None = None,
) -> ImageHashes:
    """Reads and hashes all images of a split.

    Args:
        source: see `keras_moe.data.load`, also for `split` and `data_dir`.
        progress: function of (done, total, name), called after each batch of images.

    Example:

    >>> from keras_moe.data import image_hashes
    >>> len(image_hashes("digits", "test").exact)
    450
    """
    examples = open_source(source, split, data_dir)

    def hashed(_, item):
        pixels = examples.decoded(item, examples.read(item)["image"])
        exact = tf.strings.to_hash_bucket_strong(
            tf.io.serialize_tensor(pixels), 2**63 - 1, key=[0, 0]
        )
        return exact, *_perceptual(tf.cast(pixels, "float32"))

    parts = zip(*examples.scan(hashed, progress))
    exact, bits, deviation = (np.concatenate(columns) for columns in parts)
    perceptual = np.packbits(bits, axis=1).view(">u8")[:, 0].astype("uint64")
    return ImageHashes(exact, perceptual, deviation >= _LEAST_DEVIATION)


def find_duplicates(
    hashes: ImageHashes,
    reference: ImageHashes,
    max_distance: int | None = 3,
    progress: OnProgress | None = None,
) -> np.ndarray:
    """Returns sorted indices of images that also occur in a reference, e.g. a test set.

    Args:
        hashes: hashes of the images to search.
        reference: hashes of the images to find.
        max_distance: number of bits in which perceptual hashes of copies may differ, in
            [0, 32]; None finds identical pixels only. On handwritten digits, 3 finds
            99.5% of resized or JPEG copies, and confuses no two digits.
        progress: see `image_hashes`.

    Example:

    >>> from keras_moe.data import find_duplicates, image_hashes
    >>> test = image_hashes("digits", "test")
    >>> duplicates = find_duplicates(image_hashes("digits", "all"), test)
    >>> len(duplicates) >= len(test.exact)
    True
    """
    if max_distance is not None:
        check_integer("max_distance", max_distance, 0, 32)
    is_copy = np.isin(hashes.exact, reference.exact)
    known = np.unique(reference.perceptual[reference.has_structure])
    candidates = np.flatnonzero(~is_copy & hashes.has_structure)
    if max_distance is not None and len(known):
        size = max(_BLOCK // len(known), 1)
        for at in range(0, len(candidates), size):
            block = candidates[at : at + size]
            differing = hashes.perceptual[block, None] ^ known
            parts = differing.view("u2").reshape(*differing.shape, 4)
            distances = _ONES_OF_16_BITS[parts].sum(axis=-1, dtype="u1")
            is_copy[block[distances.min(axis=1) <= max_distance]] = True
            if progress is not None:
                done = min(at + size, len(candidates))
                progress(done, len(candidates), "comparing")
    return np.flatnonzero(is_copy)


def _perceptual(pixels):
    """Returns the 64-bit hash of an image, and its standard deviation."""
    if pixels.shape[-1] == 3:
        pixels = tf.image.rgb_to_grayscale(pixels)
    # Resizing by area uses every pixel, however large the image is.
    small = tf.image.resize(pixels, (_SIZE, _SIZE), method="area")[..., 0]
    angles = (2 * np.arange(_SIZE) + 1) * np.pi / (2 * _SIZE)
    cosines = np.cos(np.arange(_FREQUENCIES)[:, None] * angles).astype("float32")
    low = tf.reshape(cosines @ small @ cosines.T, [-1])
    # The first is the mean, which changes with brightness. The others are odd in
    # number, so that their median is one of them.
    others = tf.sort(low[1:])
    return low > others[len(cosines) ** 2 // 2 - 1], tf.math.reduce_std(small)
