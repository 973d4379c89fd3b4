"""Images of a training set that are in a validation set, too, by hashes of pixels.

An exact hash finds the same pixels. A perceptual hash finds copies that were resized,
compressed again or made brighter: its 64 bits say which low frequencies of the grey
image are above their median, and copies differ in few of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.reading import reading_errors
from keras_moe.data.sources import open_source

# The side of the image that the perceptual hash reads, and its number of frequencies.
_SIZE, _FREQUENCIES = 32, 8
# The standard deviation in grey levels below which there is no structure to compare.
_LEAST_DEVIATION = 2.0
# The number of distances that are held at once.
_BLOCK = 1 << 22


class ImageHashes(NamedTuple):
    """Hashes of the images of a split, in the order of the source.

    Fields:
        exact: (N,) int64, hashes of shape and pixels.
        perceptual: (N,) uint64, hashes of low frequencies.
        has_structure: (N,) bool, False for images of one colour all over, whose
            perceptual hash means nothing.
    """

    exact: np.ndarray
    perceptual: np.ndarray
    has_structure: np.ndarray


def image_hashes(
    source: str,
    split: str,
    data_dir: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> ImageHashes:
    """Reads and hashes all images of a split.

    Args:
        source: name of a source of `keras_moe.data.load`.
        split: name of a split.
        data_dir: folder of TensorFlow Datasets.
        progress: function that is called with the number of images that are done, and
            the number of all images.

    Example:

    >>> from keras_moe.data import image_hashes
    >>> len(image_hashes("digits", "test").exact)
    450
    """
    import tensorflow as tf

    examples = open_source(source, split, data_dir)

    def hashed(_, item):
        pixels = examples.decoded(item, examples.read(item)["image"])
        exact = tf.strings.to_hash_bucket_strong(
            tf.io.serialize_tensor(pixels), 2**63 - 1, key=[0, 0]
        )
        return exact, *_perceptual(tf, tf.cast(pixels, "float32"))

    dataset = examples.all_items()
    dataset = dataset.map(hashed, num_parallel_calls=tf.data.AUTOTUNE)
    parts, done = [], 0
    with reading_errors():
        for part in dataset.batch(256).prefetch(1).as_numpy_iterator():
            parts.append(part)
            done += len(part[0])
            if progress is not None:
                progress(done, examples.count)
    exact, bits, deviation = (np.concatenate(columns) for columns in zip(*parts))
    perceptual = np.packbits(bits, axis=1).view(">u8")[:, 0].astype("uint64")
    return ImageHashes(exact, perceptual, deviation >= _LEAST_DEVIATION)


def find_duplicates(
    hashes: ImageHashes,
    reference: ImageHashes,
    max_distance: int | None = 3,
    progress: Callable[[int, int], Any] | None = None,
) -> np.ndarray:
    """Finds the images that are also in a reference, such as a validation split.

    All distances are computed, a block at a time: memory does not grow with the data.

    Args:
        hashes: hashes of the images to look through.
        reference: hashes of the images to find.
        max_distance: number of bits in which the perceptual hash of a copy may differ,
            in [0, 32]; None finds the same pixels only. Among 600 handwritten digits,
            3 finds 99.5% and more of the copies that are resized or saved as JPEG of
            quality 30, and takes no two different digits for copies.
        progress: function that is called with the number of images that are done, and
            the number of all images.

    Returns:
        Sorted indices, int64, into `hashes`: for `exclude` of `keras_moe.data.load`.

    Example:

    >>> from keras_moe.data import find_duplicates, image_hashes
    >>> test = image_hashes("digits", "test")
    >>> duplicates = find_duplicates(image_hashes("digits", "all"), test)
    >>> len(duplicates) >= len(test.exact)
    True
    """
    if max_distance is not None and (
        isinstance(max_distance, bool)
        or not isinstance(max_distance, int)
        or not 0 <= max_distance <= 32
    ):
        raise ValueError(
            "Expected max_distance to be None or an integer in [0, 32]; "
            f"received: max_distance={max_distance!r}"
        )
    is_copy = np.isin(hashes.exact, reference.exact)
    known = np.unique(reference.perceptual[reference.has_structure])
    candidates = np.flatnonzero(~is_copy & hashes.has_structure)
    if max_distance is not None and len(known):
        size = max(_BLOCK // len(known), 1)
        for at in range(0, len(candidates), size):
            block = candidates[at : at + size]
            differing = hashes.perceptual[block, None] ^ known
            near = _ones(differing).min(axis=1) <= max_distance
            is_copy[block[near]] = True
            if progress is not None:
                progress(min(at + size, len(candidates)), len(candidates))
    return np.flatnonzero(is_copy)


def _perceptual(tf, pixels):
    """64 bits of an image (height, width, 1 or 3), and its standard deviation."""
    if pixels.shape[-1] == 3:
        pixels = tf.image.rgb_to_grayscale(pixels)
    # Resizing by area counts every pixel, however large the image is.
    small = tf.image.resize(pixels, (_SIZE, _SIZE), method="area")[..., 0]
    places = (2 * np.arange(_SIZE) + 1) * np.pi / (2 * _SIZE)
    cosines = np.cos(np.arange(_FREQUENCIES)[:, None] * places).astype("float32")
    low = tf.reshape(cosines @ small @ cosines.T, [-1])
    # The first is the mean, which brightness changes. The others are odd in number, so
    # that their median is one of them.
    others = tf.sort(low[1:])
    return low > others[len(cosines) ** 2 // 2 - 1], tf.math.reduce_std(small)


_ONES_OF_16_BITS = np.array([bin(number).count("1") for number in range(1 << 16)], "u1")


def _ones(numbers: np.ndarray) -> np.ndarray:
    """The number of bits that are set in each uint64."""
    parts = numbers.view("u2").reshape(*numbers.shape, 4)
    return _ONES_OF_16_BITS[parts].sum(axis=-1, dtype="u1")
