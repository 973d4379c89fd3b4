"""Exact precision@1 and average precision of multi-label classification.

Labels are 0-1 vectors (N, C), or class numbers (N, L) padded with -1 if
`sparse_labels`, of N examples and C classes. Examples of weight 0 do not count.
"""

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import unfit


def precision_at_1(
    labels: ArrayLike,
    scores: ArrayLike,
    sample_weight: ArrayLike | None = None,
    sparse_labels: bool = False,
) -> float:
    """Fraction of examples whose highest score belongs to one of their classes.

    Args:
        labels: (N, C) 0-1 vectors, or (N, L) class numbers.
        scores: (N, C), logits or probabilities.
        sample_weight: (N,), or None for ones.
        sparse_labels: whether labels are class numbers.

    Example:

    >>> from keras_moe.evaluation import precision_at_1
    >>> precision_at_1([[1, 0, 1], [0, 1, 0]], [[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    0.5
    """
    labels, scores, weight = _checked(labels, scores, sample_weight, sparse_labels)
    hit = labels[np.arange(len(labels)), scores.argmax(axis=1)]
    return float(weight @ hit / weight.sum())


def average_precision(
    labels: ArrayLike,
    scores: ArrayLike,
    sample_weight: ArrayLike | None = None,
    sparse_labels: bool = False,
) -> np.ndarray:
    """Average precision of each class, with examples ranked by its score.

    Sums precision times the step in recall over distinct scores, highest first: float64
    (C,), NaN for classes without examples.

    Args:
        labels, scores, sample_weight, sparse_labels: as in `precision_at_1`.

    Example:

    >>> from keras_moe.evaluation import average_precision
    >>> average_precision([[1, 0], [0, 1]], [[0.9, 0.8], [0.1, 0.3]]).tolist()
    [1.0, 0.5]
    """
    labels, scores, weight = _checked(labels, scores, sample_weight, sparse_labels)
    order = np.argsort(-scores, axis=0, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=0)
    every = np.cumsum(weight[order], axis=0)
    true = weight[order] * np.take_along_axis(labels, order, axis=0)
    hits = np.cumsum(true, axis=0)
    # Sums at the last of equal scores include all of them.
    is_last = np.ones(ranked.shape, bool)
    is_last[:-1] = ranked[:-1] != ranked[1:]
    recalled = np.diff(
        np.maximum.accumulate(np.where(is_last, hits, 0.0), axis=0), axis=0, prepend=0.0
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(every > 0, hits / every, 0.0)
        return np.where(
            hits[-1] > 0, (precision * recalled).sum(axis=0) / hits[-1], np.nan
        )


def mean_average_precision(
    labels: ArrayLike,
    scores: ArrayLike,
    sample_weight: ArrayLike | None = None,
    sparse_labels: bool = False,
) -> float:
    """Mean of `average_precision` over the classes that have examples.

    Args:
        labels, scores, sample_weight, sparse_labels: as in `precision_at_1`.

    Example:

    >>> from keras_moe.evaluation import mean_average_precision
    >>> mean_average_precision([[1, 0], [0, 1]], [[0.9, 0.8], [0.1, 0.3]])
    0.75
    """
    by_class = average_precision(labels, scores, sample_weight, sparse_labels)
    return mean_of_defined(by_class)


def mean_of_defined(values: np.ndarray) -> float:
    """Mean of average precisions, without the NaN of those undefined."""
    if np.isnan(values).all():
        raise ValueError("Expected examples with labels; received: none that count")
    return float(np.nanmean(values))


def _checked(labels, scores, weight=None, sparse_labels=False):
    """Boolean labels (N, C), scores, and float64 weights."""
    labels, scores = np.asarray(labels), np.asarray(scores)
    if not np.issubdtype(scores.dtype, np.floating):
        scores = scores.astype("float64")  # Unsigned ones have no negatives.
    weight = np.ones(len(labels)) if weight is None else np.asarray(weight, "float64")
    if (
        labels.ndim != 2
        or scores.ndim != 2
        or len(labels) != len(scores)
        or not (sparse_labels or labels.shape == scores.shape)
        or weight.shape != (len(labels),)
    ):
        raise ValueError(
            "Expected labels (N, C), or (N, L) with sparse_labels=True, scores (N, C) "
            f"and weights (N,); received: shapes {labels.shape}, {scores.shape} and "
            f"{weight.shape}, sparse_labels={sparse_labels}"
        )
    is_weight = (weight >= 0) & (weight < np.inf)
    if not np.isfinite(scores).all() or not is_weight.all():
        raise ValueError(
            "Expected finite scores, and finite weights of at least 0; received: "
            f"{np.sum(~np.isfinite(scores))} scores of NaN or Inf, and "
            f"weights {weight[~is_weight]}"
        )
    if not weight.any():
        raise unfit("examples of positive weight", f"none of {len(weight)} examples")
    highest = scores.shape[1] - 1 if sparse_labels else 1
    is_bad = ~np.isin(labels, np.arange(-1 if sparse_labels else 0, highest + 1))
    if is_bad.any():
        raise ValueError(
            f"Expected integer labels up to {highest}; received: {labels[is_bad][0]}, "
            f"with sparse_labels={sparse_labels}"
        )
    if not sparse_labels:
        return labels > 0, scores, weight
    dense = np.zeros(scores.shape, bool)
    example, column = np.nonzero(labels >= 0)
    dense[example, labels[example, column]] = True
    return dense, scores, weight
