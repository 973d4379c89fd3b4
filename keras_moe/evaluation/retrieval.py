"""Image-text retrieval in both directions, and contrastive accuracy.

Unit vectors are rounded to multiples of 2^-26, so that their products sum exactly in
float64, and ties are the same on every machine and for every chunk size.

Axes: N images, M texts, P embedding, K values of k, B batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import check_integer, unfit
from keras_moe.evaluation._features import NAMED, check_labels, check_matrix, to_numpy

_STEPS = 2.0**26
CHUNK_SIZE = 2048
KS = (1, 5, 10)
BATCH_SIZE = 1024


class RetrievalResult(NamedTuple):
    """Recalls in both directions, and the ranks behind them.

    Attributes:
        ks: values of k.
        image_to_text: (K,), share of images with one of their texts among the nearest.
        text_to_image: (K,), share of texts with one of their images among the nearest.
        image_ranks: int (N,), rank from 1 of the best of each image's own texts.
        text_ranks: int (M,), rank from 1 of the best of each text's own images.
    """

    ks: tuple[int, ...]
    image_to_text: np.ndarray
    text_to_image: np.ndarray
    image_ranks: np.ndarray
    text_ranks: np.ndarray

    def figures(self) -> dict[str, float]:
        """The recalls by name, such as `"image_to_text_r5"`."""
        return {
            f"{direction}_r{k}": float(recall)
            for direction in ("image_to_text", "text_to_image")
            for k, recall in zip(self.ks, getattr(self, direction))
        }


class ContrastiveAccuracyResult(NamedTuple):
    """How often pairs are matched within a batch.

    Attributes:
        image_to_text: share of images whose nearest text of the batch is theirs.
        text_to_image: share of texts whose nearest image of the batch is theirs.
        batch_size: pairs per batch.
        num_pairs: number of pairs counted, those in full batches.
    """

    image_to_text: float
    text_to_image: float
    batch_size: int
    num_pairs: int

    @property
    def accuracy(self) -> float:
        """Mean of both directions."""
        return (self.image_to_text + self.text_to_image) / 2

    def figures(self) -> dict[str, float]:
        """The accuracies by name."""
        return {
            "accuracy": self.accuracy,
            "image_to_text": self.image_to_text,
            "text_to_image": self.text_to_image,
        }


def retrieval(
    image_embeddings: ArrayLike,
    text_embeddings: ArrayLike,
    image_of_text: ArrayLike | None = None,
    ks: Sequence[int] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
    text_ids: ArrayLike | None = None,
) -> RetrievalResult:
    """R@k in both directions by cosine similarity, with any number of texts per image.

    The protocol of COCO and Flickr30k: an image is a hit if one of its texts is among
    the k nearest, a text if its image is. With `text_ids`, texts with the same id match
    the images of all of them.

    Of equal similarities the lower index ranks first, so that collapsed embeddings have
    chance recall. Memory grows with N + M, not N M.

    Args:
        image_embeddings: (N, P), nonzero; need not be unit vectors.
        text_embeddings: (M, P), nonzero.
        image_of_text: (M,) integers, index of each text's image (all images need one);
            None if text i belongs to image i.
        ks: values of k, at most N and M; None for 1, 5 and 10, as far as they are.
        chunk_size: number of images and texts compared at a time.
        text_ids: (M,) integers, equal for equal texts; or None.

    Example:

    >>> from keras_moe.evaluation import retrieval
    >>> images = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> texts = np.array([[0.9, 0.1], [0.6, 0.8], [0.2, 0.9]])
    >>> result = retrieval(images, texts, image_of_text=[0, 0, 1], ks=(1, 2))
    >>> result.image_to_text.tolist(), result.text_to_image.round(2).tolist()
    ([1.0, 1.0], [0.67, 1.0])
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    texts = check_embeddings("text_embeddings", text_embeddings, images.shape[1])
    if image_of_text is None:
        image_of_text = np.arange(len(images))
    owner = check_labels("image_of_text", image_of_text, len(texts), len(images))
    if len(np.unique(owner)) < len(images):
        raise ValueError(
            "Expected image_of_text with a text of each image; received: texts of "
            f"{len(np.unique(owner))} of {len(images)} images"
        )
    check_integer("chunk_size", chunk_size)
    fewest = min(len(images), len(texts))
    ks = check_ks([k for k in KS if k <= fewest] if ks is None else ks, fewest)
    own = _own_pairs(owner, text_ids)
    image_ranks, text_ranks = _ranks(images, texts, *own, chunk_size)
    image_recall, text_recall = (
        np.array([np.mean(ranks <= k) for k in ks])
        for ranks in (image_ranks, text_ranks)
    )
    return RetrievalResult(ks, image_recall, text_recall, image_ranks, text_ranks)


def contrastive_accuracy(
    image_embeddings: ArrayLike,
    text_embeddings: ArrayLike,
    contrastive_batch_size: int = BATCH_SIZE,
    image_ids: ArrayLike | None = None,
    text_ids: ArrayLike | None = None,
) -> ContrastiveAccuracyResult:
    """How often images and texts find each other within a batch.

    Batches are consecutive pairs, without an incomplete last one. Of equal similarities
    the lower index is nearer, so that a collapsed model has chance accuracy
    (`keras_moe.models.ContrastiveAccuracy` counts ties as wrong). With ids, any text of
    the same image, and any image of the same text, is a hit.

    Args:
        image_embeddings: (M, P), nonzero.
        text_embeddings: (M, P), of the same pairs.
        contrastive_batch_size: B, at most M.
        image_ids: (M,) integers, equal for pairs that share an image; or None.
        text_ids: (M,) integers, equal for pairs that share a text; or None.

    Example:

    >>> from keras_moe.evaluation import contrastive_accuracy
    >>> images = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> texts = np.array([[0.9, 0.1], [0.8, 0.6]])
    >>> result = contrastive_accuracy(images, texts, contrastive_batch_size=2)
    >>> result.image_to_text, result.text_to_image
    (1.0, 0.5)
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    texts = check_embeddings("text_embeddings", text_embeddings, images.shape[1])
    size = check_integer("contrastive_batch_size", contrastive_batch_size)
    if not len(images) == len(texts) >= size:
        expected = f"pairs, at least contrastive_batch_size={size} of them"
        raise unfit(expected, f"{len(images)} images and {len(texts)} texts")
    given = [ids for ids in (image_ids, text_ids) if ids is not None]
    ids = [_check_ids(x, len(images)) for x in given] or [np.arange(len(images))]
    num_pairs = len(images) // size * size
    hits = np.zeros(2, "int64")
    for start in range(0, num_pairs, size):
        part = slice(start, start + size)
        similarities = unit_vectors(images[part]) @ unit_vectors(texts[part]).T
        for direction, nearest in enumerate(
            (similarities.argmax(axis=1), similarities.argmax(axis=0))
        ):
            hit = [x[part][nearest] == x[part] for x in ids]
            hits[direction] += np.logical_or.reduce(hit).sum()
    to_text, to_image = (hits / num_pairs).tolist()
    return ContrastiveAccuracyResult(to_text, to_image, size, num_pairs)


def _check_ids(ids, length):
    ids = to_numpy(ids)
    if ids.shape != (length,) or ids.dtype.kind not in "iu":
        expected = f"ids of shape ({length},), integers"
        raise unfit(expected, f"shape={ids.shape}, dtype={ids.dtype}")
    return ids


def _own_pairs(owner, text_ids):
    """Indices of the images and texts that belong together."""
    texts = np.arange(len(owner))
    if text_ids is None:
        return owner, texts
    _, group = np.unique(_check_ids(text_ids, len(owner)), return_inverse=True)
    # Pair each image with all texts of its groups; texts are sorted by group.
    texts, counts = np.argsort(group, kind="stable"), np.bincount(group)
    images, groups = np.unique(np.stack([owner, group]), axis=1)
    lengths = counts[groups]
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    starts = np.repeat((counts.cumsum() - counts)[groups], lengths)
    return np.repeat(images, lengths), texts[starts + within]


def _ranks(images, texts, image_of_pair, text_of_pair, chunk_size):
    """Ranks from 1 of each image's best own text, and the reverse."""
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
    """Each row's nearest own column, and its similarity."""
    order = np.lexsort((columns, -similarities, rows))
    _, first = np.unique(rows[order], return_index=True)
    return columns[order[first]], similarities[order[first]]


# Similarities


def check_embeddings(
    name: str, embeddings: ArrayLike, dim: int | None = None
) -> np.ndarray:
    """Checks that embeddings (N, P) are finite and nonzero."""
    embeddings = check_matrix(name, embeddings, dim)
    for start in range(0, len(embeddings), CHUNK_SIZE):
        lengths = norms(embeddings[start : start + CHUNK_SIZE].astype("float64"))
        bad = start + np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
        if bad.size:
            expected = f"finite {name}, none of them 0"
            raise unfit(expected, f"others, first at indices {bad[:NAMED].tolist()}")
    return embeddings


def check_ks(ks: Sequence[int], highest: int | None = None) -> tuple[int, ...]:
    """Checks that values of k are integers from 1 to `highest`."""
    return tuple(check_integer("ks", k, 1, highest) for k in ks)


def unit_vectors(embeddings: np.ndarray) -> np.ndarray:
    """Float64 unit vectors, rounded so that their products are exact."""
    embeddings = np.ascontiguousarray(embeddings, "float64")
    units = embeddings / norms(embeddings)[:, None]
    units *= _STEPS
    np.rint(units, out=units)
    units /= _STEPS
    return units


def count_before(
    similarities: np.ndarray, own: np.ndarray, own_column: np.ndarray, start: int = 0
) -> np.ndarray:
    """Number of columns ranked before each row's own; ties go to the lower index."""
    stop = start + similarities.shape[1]
    # In columns before its own ties count: x >= own is x > the next lower number.
    limit = np.where(own_column >= stop, np.nextafter(own, -np.inf), own)
    is_higher = similarities > limit[:, None]
    count = is_higher.view("uint8").sum(axis=1, dtype="int64")
    rows = np.flatnonzero((start <= own_column) & (own_column < stop))
    if rows.size:
        is_equal = similarities[rows] == own[rows, None]
        is_equal &= np.arange(start, stop) < own_column[rows, None]
        count[rows] += is_equal.sum(axis=1)
    return count


def norms(embeddings: np.ndarray) -> np.ndarray:
    """Norms (N,) of embeddings (N, P)."""
    # NaN and infinities propagate without a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.square(embeddings).sum(axis=1))
