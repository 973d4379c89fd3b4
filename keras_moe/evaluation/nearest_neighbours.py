"""Classification by the nearest training examples of frozen features.

Axes: N training and M test examples, F feature dim, C classes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import check_integer, check_positive
from keras_moe.evaluation._features import check_labels, to_numpy
from keras_moe.evaluation.retrieval import check_embeddings, norms

# Number of similarities computed at a time, 64 MB of them.
_CHUNK = 2**23


class NearestNeighboursResult(NamedTuple):
    """How the nearest training examples vote.

    Attributes:
        accuracy: share of test examples whose class has most votes.
        predictions: int (M,), that class; of equal ones the lower.
        scores: (M, C), each class's share of the votes.
    """

    accuracy: float
    predictions: np.ndarray
    scores: np.ndarray


def nearest_neighbours(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    k: int = 20,
    temperature: float = 0.07,
    *,
    num_classes: int | None = None,
) -> NearestNeighboursResult:
    """Classifies by a weighted vote of the k nearest training examples.

    Each votes with a weight of exp(s / temperature), for its cosine similarity s. Of
    equal similarities the lower index is nearer.

    Args:
        train_features: (N, F).
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        k: number of neighbours that vote, at most N.
        temperature: see above; small for the nearest alone.
        num_classes: C; by default the highest label + 1.

    References: *Unsupervised Feature Learning via Non-Parametric Instance
        Discrimination*, section 3.4; *Emerging Properties in Self-Supervised Vision
        Transformers* (DINO), section 4.1 and `eval_knn.py` of its release.

    Example:

    >>> from keras_moe.evaluation import nearest_neighbours
    >>> train = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    >>> result = nearest_neighbours(train, [0, 0, 1], [[2.0, 0.1]], [0], k=2)
    >>> result.accuracy, result.scores
    (1.0, array([[1., 0.]]))
    """
    train = check_embeddings("train_features", train_features)
    labels = check_labels("train_labels", train_labels, len(train), num_classes)
    test = check_embeddings("test_features", test_features, train.shape[1])
    test_labels = check_labels("test_labels", test_labels, len(test), num_classes)
    k = check_integer("k", k, 1, len(train))
    temperature = check_positive("temperature", temperature)
    if num_classes is None:
        num_classes = int(max(labels.max(), test_labels.max())) + 1
    train, test = _normalised(train), _normalised(test)
    scores = np.empty((len(test), num_classes))
    rows = max(_CHUNK // len(train), 1)
    for start in range(0, len(test), rows):
        similarities = test[start : start + rows] @ train.T
        nearest = _nearest(similarities, k)
        own = np.take_along_axis(similarities, nearest, axis=1)
        # A factor for each row, which no share depends on, and nothing overflows.
        votes = np.exp((own - own.max(axis=1, keepdims=True)) / temperature)
        places = labels[nearest] + num_classes * np.arange(len(own))[:, None]
        sums = np.bincount(places.ravel(), votes.ravel(), len(own) * num_classes)
        scores[start : start + rows] = sums.reshape(-1, num_classes)
        scores[start : start + rows] /= votes.sum(axis=1, keepdims=True)
    predictions = scores.argmax(axis=1)
    accuracy = float((predictions == test_labels).mean())
    return NearestNeighboursResult(accuracy, predictions, scores)


def _normalised(features: np.ndarray) -> np.ndarray:
    features = to_numpy(features).astype("float64")
    return features / norms(features)[:, None]


def _nearest(similarities: np.ndarray, k: int) -> np.ndarray:
    """Columns (M, k) of each row's highest values; of equal ones, the first."""
    lowest = np.partition(similarities, -k, axis=1)[:, -k, None]
    higher, equal = similarities > lowest, similarities == lowest
    missing = k - higher.sum(axis=1, keepdims=True)
    chosen = higher | (equal & (equal.cumsum(axis=1) <= missing))
    return np.nonzero(chosen)[1].reshape(-1, k)
