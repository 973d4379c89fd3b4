"""A baseline of retrieval that learns nothing: captions of the nearest images.

Axes: N images, T training images, M texts, V words.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe.evaluation.feature_checks import to_numpy

# Images that are compared at a time.
_CHUNK = 256
_WORD = re.compile(r"\w+")


def nearest_caption_embeddings(
    train_images: Any,
    train_captions: Sequence[str],
    images: Any,
    captions: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of a baseline that knows pixels and words alone.

    An image stands for the caption of the training image that is nearest to it in
    pixels, and a caption for its words: `keras_moe.evaluation.retrieval` of the result
    is the recall of looking up the nearest training image, and then the caption that
    shares most words with that image's. Where test images have near twins among the
    training images, this is far above chance, and the number that a model has to beat.

    Args:
        train_images: (T, height, width, channels), of any range.
        train_captions: T strings.
        images: (N, height, width, channels), of the same range.
        captions: M strings.

    Returns:
        Image embeddings (N, V) and text embeddings (M, V), float32 unit vectors of
        words. A caption without a word of letters or digits is a word of its own.

    Raises:
        ValueError: if there are no images or captions, their numbers differ, or images
            have other shapes.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import nearest_caption_embeddings, retrieval
    >>> train = np.array([0.0, 1.0]).reshape(2, 1, 1, 1)
    >>> test = np.array([0.1, 0.8]).reshape(2, 1, 1, 1)
    >>> embeddings = nearest_caption_embeddings(
    ...     train, ["black cat", "white dog"], test, ["a black cat", "a white dog"]
    ... )
    >>> retrieval(*embeddings, ks=(1,)).image_to_text.tolist()
    [1.0]
    """
    known, pixels = _rows("train_images", train_images), _rows("images", images)
    if known.shape[1] != pixels.shape[1] or len(known) != len(train_captions):
        raise ValueError(
            "Expected images of one shape, and a caption for each training image; "
            f"received: train_images.shape={np.shape(train_images)}, "
            f"images.shape={np.shape(images)}, {len(train_captions)} train_captions"
        )
    if not len(captions):
        raise ValueError("Expected captions; received: captions=[]")
    words = [_words(caption) for caption in captions]
    known_words = [_words(caption) for caption in train_captions]
    place = {}
    for word in (word for row in (*known_words, *words) for word in row):
        place.setdefault(word, len(place))
    nearest = _nearest(known, pixels)
    return (
        _vectors([known_words[index] for index in nearest], place),
        _vectors(words, place),
    )


def _rows(name, images):
    images = to_numpy(images)
    if images.ndim != 4 or not len(images):
        raise ValueError(
            f"Expected {name} (batch, height, width, channels); "
            f"received: {name}.shape={images.shape}"
        )
    # Enough for sums of squares, of bytes, too.
    return images.reshape(len(images), -1).astype("float32")


def _words(caption):
    return sorted(set(_WORD.findall(caption.lower())) or {caption})


def _nearest(known, pixels):
    """The index of the nearest of the known rows, by squared distance."""
    norms = np.sum(np.square(known), axis=1)
    nearest = []
    for first in range(0, len(pixels), _CHUNK):
        products = pixels[first : first + _CHUNK] @ known.T
        nearest.extend(np.argmin(norms - 2 * products, axis=1))
    return nearest


def _vectors(rows, place):
    vectors = np.zeros((len(rows), len(place)), "float32")
    for vector, words in zip(vectors, rows):
        vector[[place[word] for word in words]] = len(words) ** -0.5
    return vectors
