"""Retrieval of texts by images and of images by texts, and contrastive accuracy.

Axes: N images, M texts, P embedding, K values of k, B batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe.checks import check_integer
from keras_moe.evaluation.feature_checks import check_labels, to_numpy
from keras_moe.evaluation.similarities import (
    CHUNK_SIZE,
    check_embeddings,
    check_ks,
    count_before,
    unit_vectors,
)

KS = (1, 5, 10)
BATCH_SIZE = 1024


class RetrievalResult(NamedTuple):
    """Recalls of both directions, and the ranks that they summarise.

    Fields:
        ks: the values of k.
        image_to_text: (K,), share of images one of whose own texts is among the k
            nearest texts.
        text_to_image: (K,), share of texts whose own image, or one of them, is among
            the k nearest images.
        image_ranks: int (N,), rank from 1 of the best of each image's own texts.
        text_ranks: int (M,), rank from 1 of the best of each text's own images.
    """

    ks: tuple[int, ...]
    image_to_text: np.ndarray
    text_to_image: np.ndarray
    image_ranks: np.ndarray
    text_ranks: np.ndarray

    def figures(self) -> dict[str, float]:
        """The recalls by name, such as `"image_to_text_r5"`, for logs and JSON."""
        return {
            f"{direction}_r{k}": float(recall)
            for direction in ("image_to_text", "text_to_image")
            for k, recall in zip(self.ks, getattr(self, direction))
        }


class ContrastiveAccuracyResult(NamedTuple):
    """How often a pair finds itself among the pairs of a batch.

    Fields:
        image_to_text: share of images whose nearest text of the batch is theirs.
        text_to_image: share of texts whose nearest image of the batch is theirs.
        batch_size: number of pairs of a batch.
        num_pairs: number of pairs that were counted, those of whole batches.
    """

    image_to_text: float
    text_to_image: float
    batch_size: int
    num_pairs: int

    @property
    def accuracy(self) -> float:
        """The mean of both directions."""
        return (self.image_to_text + self.text_to_image) / 2

    def figures(self) -> dict[str, float]:
        """The accuracies by name, for logs and JSON."""
        return {
            "accuracy": self.accuracy,
            "image_to_text": self.image_to_text,
            "text_to_image": self.text_to_image,
        }


def retrieval(
    image_embeddings: Any,
    text_embeddings: Any,
    image_of_text: Any = None,
    ks: Sequence[int] = KS,
    chunk_size: int = CHUNK_SIZE,
    text_ids: Any = None,
) -> RetrievalResult:
    """R@k of both directions by cosine similarity, with any number of texts an image.

    This is the protocol of COCO and Flickr30k: an image is a hit if any of its own
    texts is among the k nearest, a text if its image is. There a caption of one image
    that another has, too, is wrong for the other, although nothing tells them apart;
    with `text_ids`, texts of one id belong to all images that have one of them. All
    texts remain candidates. Where similarities are equal, the lower index is nearer, so
    that embeddings that are all alike have the recall of chance. Similarities are
    computed chunk by chunk and only counted: memory grows with N + M, and with the
    pairs that `text_ids` make. They are exact (see
    `keras_moe.evaluation.similarities`), and so ranks do not depend on `chunk_size`.

    Args:
        image_embeddings: (N, P), of any length other than 0.
        text_embeddings: (M, P), of any length other than 0.
        image_of_text: (M,) integers, index of each text's image; None if text i belongs
            to image i. Each image has at least one text.
        ks: values of k, none above N or M.
        chunk_size: number of images and of texts that are compared at a time.
        text_ids: (M,) integers, equal for equal texts; None if each is its own.

    Returns:
        A `RetrievalResult`.

    Raises:
        ValueError: if embeddings have the wrong shape, are not finite or 0, if an image
            has no text or a text no image, or a k is above N or M.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import retrieval
    >>> images = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> texts = np.array([[0.9, 0.1], [0.6, 0.8], [0.2, 0.9]])
    >>> result = retrieval(images, texts, image_of_text=[0, 0, 1], ks=(1, 2))
    >>> result.image_to_text.tolist(), result.text_to_image.round(2).tolist()
    ([1.0, 1.0], [0.67, 1.0])
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    texts = check_embeddings("text_embeddings", text_embeddings, images.shape[1])
    owner = _check_owners(image_of_text, len(images), len(texts))
    chunk_size = check_integer("chunk_size", chunk_size)
    counts = f"images={len(images)}, texts={len(texts)}"
    ks = check_ks(ks, min(len(images), len(texts)), "candidates", counts)
    own = _own_pairs(owner, text_ids)
    image_ranks, text_ranks = _ranks(images, texts, *own, chunk_size)
    recalls = (
        np.array([np.mean(ranks <= k) for k in ks])
        for ranks in (image_ranks, text_ranks)
    )
    return RetrievalResult(ks, *recalls, image_ranks, text_ranks)


def contrastive_accuracy(
    image_embeddings: Any,
    text_embeddings: Any,
    batch_size: int = BATCH_SIZE,
    image_ids: Any = None,
    text_ids: Any = None,
) -> ContrastiveAccuracyResult:
    """How often the nearest text of a batch is an image's own, and the reverse.

    Batches are consecutive pairs. Chance depends on their size, so that the pairs of a
    last batch that is not whole do not count. Where similarities are equal, the
    lower index is nearer, so that a collapsed model has the accuracy of chance; the
    metric `keras_moe.models.ContrastiveAccuracy` counts a tie as wrong.

    Args:
        image_embeddings: (M, P), of any length other than 0.
        text_embeddings: (M, P), those of the same pairs.
        batch_size: B, at most M.
        image_ids: (M,) integers, equal for pairs of one image: any of its texts is a
            hit. None if each pair has its own.
        text_ids: (M,) integers, equal for pairs of one text, any image of which is a
            hit; or None.

    Returns:
        A `ContrastiveAccuracyResult`.

    Raises:
        ValueError: if embeddings have the wrong shape, are not finite or 0, if ids do
            not fit, or there are fewer pairs than `batch_size`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import contrastive_accuracy
    >>> images = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> texts = np.array([[0.9, 0.1], [0.8, 0.6]])
    >>> result = contrastive_accuracy(images, texts, batch_size=2)
    >>> result.image_to_text, result.text_to_image
    (1.0, 0.5)
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    texts = check_embeddings("text_embeddings", text_embeddings, images.shape[1])
    batch_size = check_integer("batch_size", batch_size)
    if not len(images) == len(texts) >= batch_size:
        raise ValueError(
            f"Expected pairs, at least batch_size={batch_size} of them; received: "
            f"{len(images)} images and {len(texts)} texts"
        )
    ids = [
        _check_ids(name, x, len(images))
        for name, x in (("image_ids", image_ids), ("text_ids", text_ids))
        if x is not None
    ] or [np.arange(len(images))]
    num_pairs = len(images) // batch_size * batch_size
    hits = np.zeros(2, "int64")
    for start in range(0, num_pairs, batch_size):
        part = slice(start, start + batch_size)
        similarities = unit_vectors(images[part]) @ unit_vectors(texts[part]).T
        for direction, nearest in enumerate(
            (similarities.argmax(axis=1), similarities.argmax(axis=0))
        ):
            hit = [x[part][nearest] == x[part] for x in ids]
            hits[direction] += np.logical_or.reduce(hit).sum()
    return ContrastiveAccuracyResult(
        *(hits / num_pairs).tolist(), batch_size, num_pairs
    )


def _check_ids(name, ids, length):
    ids = to_numpy(ids)
    if ids.shape != (length,) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"Expected {name} of shape ({length},), integers; received: "
            f"shape={ids.shape}, dtype={ids.dtype}"
        )
    return ids


def _check_owners(image_of_text, num_images, num_texts):
    """The index of each text's image; each image has one."""
    if image_of_text is None:
        if num_images != num_texts:
            raise ValueError(
                "Expected image_of_text, the index of each text's image, or as many "
                f"texts as images; received: image_of_text=None, {num_images} images "
                f"and {num_texts} texts"
            )
        return np.arange(num_images)
    owner = check_labels("image_of_text", image_of_text, num_texts, num_images)
    without = np.flatnonzero(np.bincount(owner, minlength=num_images) == 0)
    if without.size:
        raise ValueError(
            "Expected a text of each image; received: none of "
            f"{without.size} of {num_images} images, first of index {without[0]}"
        )
    return owner


def _own_pairs(owner, text_ids):
    """The images and the texts that belong together, as two arrays of indices."""
    texts = np.arange(len(owner))
    if text_ids is None:
        return owner, texts
    _, group = np.unique(
        _check_ids("text_ids", text_ids, len(owner)), return_inverse=True
    )
    # Each image with all texts of each of its groups, which stand side by side.
    texts, counts = np.argsort(group, kind="stable"), np.bincount(group)
    images, groups = np.unique(np.stack([owner, group]), axis=1)
    lengths = counts[groups]
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    starts = np.repeat((counts.cumsum() - counts)[groups], lengths)
    return np.repeat(images, lengths), texts[starts + within]


def _ranks(images, texts, image_of_pair, text_of_pair, chunk_size):
    """The ranks from 1 of the best own text of each image, and the reverse."""
    num_images, num_texts = len(images), len(texts)
    own = np.empty(len(image_of_pair))
    for start in range(0, len(own), chunk_size):
        part = slice(start, start + chunk_size)
        pairs = (
            unit_vectors(images[image_of_pair[part]]),
            unit_vectors(texts[text_of_pair[part]]),
        )
        own[part] = np.einsum("mp,mp->m", *pairs)
    best_text, image_own = _best(image_of_pair, text_of_pair, own)
    best_image, text_own = _best(text_of_pair, image_of_pair, own)
    image_ranks, text_ranks = np.ones(num_images, "int64"), np.ones(num_texts, "int64")
    for i in range(0, num_images, chunk_size):
        rows = slice(i, i + chunk_size)
        units = unit_vectors(images[rows])
        for j in range(0, num_texts, chunk_size):
            columns = slice(j, j + chunk_size)
            chunk = units @ unit_vectors(texts[columns]).T
            image_ranks[rows] += count_before(
                chunk, image_own[rows], best_text[rows], j
            )
            text_ranks[columns] += count_before(
                chunk.T, text_own[columns], best_image[columns], i
            )
    return image_ranks, text_ranks


def _best(rows, columns, similarities):
    """Each row's nearest own column, the first of equal ones, and its similarity."""
    order = np.lexsort((columns, -similarities, rows))
    _, first = np.unique(rows[order], return_index=True)
    return columns[order[first]], similarities[order[first]]
