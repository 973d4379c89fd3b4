"""Baselines of retrieval that a trained model of pairs has to beat.

Axes: N images, T training images, M texts, V words, or parts of words.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe.checks import check_positive
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
    known, pixels = _pixels(train_images, train_captions, images, captions)
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


def kernel_ridge_embeddings(
    train_images: Any,
    train_captions: Sequence[str],
    images: Any,
    captions: Sequence[str],
    width: float = 1.0,
    penalty: float = 0.01,
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of a kernel ridge regression from pixels to parts of words.

    A caption is the TF-IDF vector of its runs of two to four letters, and an image is
    the vector that the regression predicts: `K(X, T) (K(T, T) + penalty I)^-1 Y`, with
    the training captions' vectors `Y`, the kernel `K(a, b) = exp(-d(a, b) / (width m))`
    of sums `d` of absolute differences, and the median `m` of the training
    images'. It is fitted in seconds, and on small sets it is hard to beat.

    Args:
        train_images: (T, height, width, channels), of any range; time and memory grow
            with the square of T.
        train_captions: T strings.
        images: (N, height, width, channels), of the same range.
        captions: M strings.
        width: width of the kernel, as a multiple of the median distance.
        penalty: penalty of the regression.

    Returns:
        Image embeddings (N, V) and text embeddings (M, V), float32, for
        `keras_moe.evaluation.retrieval`.

    Raises:
        ValueError: if there are no images or captions, their numbers differ, images
            have other shapes, or `width` or `penalty` is not above 0.
        ImportError: if scikit-learn is not installed.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import kernel_ridge_embeddings, retrieval
    >>> train = np.array([0.0, 1.0]).reshape(2, 1, 1, 1)
    >>> test = np.array([0.1, 0.8]).reshape(2, 1, 1, 1)
    >>> embeddings = kernel_ridge_embeddings(
    ...     train, ["black cat", "white dog"], test, ["a black cat", "a white dog"]
    ... )
    >>> retrieval(*embeddings, ks=(1,)).image_to_text.tolist()
    [1.0]
    """
    for name, value in (("width", width), ("penalty", penalty)):
        check_positive(name, value)
    known, pixels = _pixels(train_images, train_captions, images, captions)
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.metrics.pairwise import manhattan_distances
    except ImportError as error:
        raise ImportError(
            'The baseline is scikit-learn\'s: pip install "keras-moe[digits]"'
        ) from error
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    # The inverse frequencies are those of all captions: a test caption may have none of
    # the parts of the training captions, and is a vector all the same.
    vectors.fit([*train_captions, *captions])
    distances = manhattan_distances(known)
    scale = float(np.median(distances)) * width or 1.0
    kernel = np.exp(-distances / scale)
    kernel[np.diag_indices_from(kernel)] += penalty
    similar = np.exp(-manhattan_distances(pixels, known) / scale)
    weights = np.linalg.solve(kernel, similar.T).T
    predicted = weights @ vectors.transform(train_captions)
    texts = vectors.transform(captions).toarray()
    return predicted.astype("float32"), texts.astype("float32")


def _pixels(train_images, train_captions, images, captions):
    """The rows of training images and of images, if they fit the captions."""
    known, pixels = _rows("train_images", train_images), _rows("images", images)
    if known.shape[1] != pixels.shape[1] or len(known) != len(train_captions):
        raise ValueError(
            "Expected images of one shape, and a caption for each training image; "
            f"received: train_images.shape={np.shape(train_images)}, "
            f"images.shape={np.shape(images)}, {len(train_captions)} train_captions"
        )
    if not len(captions):
        raise ValueError("Expected captions; received: captions=[]")
    for caption in (*train_captions, *captions):
        if not isinstance(caption, str):
            raise ValueError(f"Expected strings as captions; received: {caption!r}")
    return known, pixels


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
