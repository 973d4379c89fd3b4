"""Precision@1 and average precision of multi-label classification, exact.

Labels are 0-1 vectors (N, C), or with `sparse_labels=True` numbers of classes (N, L),
padded with -1. Weights of 0 leave examples out, such as those that fill up a batch.

Axes: N examples, C classes, L labels of an example.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def precision_at_1(
    labels: Any, scores: Any, sample_weight: Any = None, sparse_labels: bool = False
) -> float:
    """The share of examples whose highest score is that of one of their classes.

    An example without labels counts as wrong.

    Args:
        labels: (N, C) 0-1 vectors, or (N, L) numbers of classes.
        scores: (N, C), logits or probabilities.
        sample_weight: (N,), or None for ones.
        sparse_labels: whether labels are numbers of classes.

    Raises:
        ValueError: if shapes do not fit together, or no weight is positive.

    Example:

    >>> from keras_moe.evaluation import precision_at_1
    >>> precision_at_1([[1, 0, 1], [0, 1, 0]], [[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    0.5
    """
    labels, scores, weight = _checked(labels, scores, sample_weight, sparse_labels)
    hit = labels[np.arange(len(labels)), scores.argmax(axis=1)]
    return float(weight @ hit / weight.sum())


def average_precision(
    labels: Any, scores: Any, sample_weight: Any = None, sparse_labels: bool = False
) -> np.ndarray:
    """The average precision of each class: examples ranked by its score.

    The sum, over the distinct scores from the highest on, of the step in recall times
    the precision there. Equal scores are one step.

    Args:
        labels: (N, C) 0-1 vectors, or (N, L) numbers of classes.
        scores: (N, C), logits or probabilities.
        sample_weight: (N,), or None for ones.
        sparse_labels: whether labels are numbers of classes.

    Returns:
        float64 (C,), NaN for classes without examples.

    Raises:
        ValueError: if shapes do not fit together, or no weight is positive.

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
    found = np.cumsum(true, axis=0)
    # The last of each group of equal scores has the whole group.
    is_last = np.ones(ranked.shape, bool)
    is_last[:-1] = ranked[:-1] != ranked[1:]
    recalled = np.diff(
        np.maximum.accumulate(np.where(is_last, found, 0.0), axis=0),
        axis=0,
        prepend=0.0,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(every > 0, found / every, 0.0)
        return np.where(
            found[-1] > 0, (precision * recalled).sum(axis=0) / found[-1], np.nan
        )


def mean_average_precision(
    labels: Any,
    scores: Any,
    sample_weight: Any = None,
    sparse_labels: bool = False,
    over: str = "classes",
) -> float:
    """The mean of average precisions, of classes or of examples.

    Args:
        labels: (N, C) 0-1 vectors, or (N, L) numbers of classes.
        scores: (N, C), logits or probabilities.
        sample_weight: (N,), or None for ones.
        sparse_labels: whether labels are numbers of classes.
        over: `"classes"`, all alike, where examples are ranked; or `"examples"`, where
            the classes are, as for mAP@k of JFT. What has no positives is left out.

    Raises:
        ValueError: if shapes do not fit together, no weight is positive, or nothing
            has positives.

    Example:

    >>> from keras_moe.evaluation import mean_average_precision
    >>> mean_average_precision([[1, 0], [0, 1]], [[0.9, 0.8], [0.1, 0.3]])
    0.75
    """
    if over not in ("classes", "examples"):
        raise ValueError(f"Expected 'classes' or 'examples'; received: over={over!r}")
    if over == "classes":
        return mean_of_defined(
            average_precision(labels, scores, sample_weight, sparse_labels)
        )
    labels, scores, weight = _checked(labels, scores, sample_weight, sparse_labels)
    values = average_precision(labels.T, scores.T)
    weight = np.where(np.isnan(values), 0.0, weight)
    if not weight.sum() > 0:
        raise ValueError("Expected an example with labels; received: none")
    return float(np.nansum(weight * values) / weight.sum())


def streamed_average_precision(
    batches: Callable[[], Iterable], num_classes: int, sparse_labels: bool = False
) -> np.ndarray:
    """`average_precision` of batch after batch, without all scores in memory.

    It takes the batches twice: first it keeps the scores of the positives alone, of
    which there are few; then it counts how many examples are ranked above each.

    Args:
        batches: gives an iterable of (labels, scores) or (labels, scores, weights), as
            the arguments of `average_precision`, twice the same.
        num_classes: C.
        sparse_labels: whether labels are numbers of classes.

    Returns:
        float64 (C,), NaN for classes without examples.

    Raises:
        ValueError: if shapes do not fit together, or there are no batches, or not the
            same twice.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import streamed_average_precision
    >>> batch = np.array([[0, -1], [1, -1]]), np.array([[0.9, 0.8], [0.1, 0.3]])
    >>> streamed_average_precision(lambda: [batch], 2, sparse_labels=True).tolist()
    [1.0, 0.5]
    """
    found = []
    for labels, scores, weight in _each(batches, num_classes, sparse_labels):
        example, label = np.nonzero(labels * (weight > 0)[:, None])
        found.append((label, scores[example, label], weight[example]))
    if not found:
        raise ValueError("Expected batches; received: none")
    classes, at, weights = (np.concatenate(parts) for parts in zip(*found))
    order = np.lexsort((at, classes))
    classes, at, weights = classes[order], at[order], weights[order]
    starts = np.searchsorted(classes, np.arange(num_classes + 1))
    # Of each positive, the weight of examples from its score up to the next one's.
    every = np.zeros(len(at))
    present = [c for c in range(num_classes) if starts[c] < starts[c + 1]]
    for _, scores, weight in _each(batches, num_classes, sparse_labels):
        columns = np.ascontiguousarray(scores.T)
        for c in present:
            mine = at[starts[c] : starts[c + 1]]
            # Before the first of equal scores is none; the first of them gets all.
            place = np.searchsorted(mine, columns[c], side="right") - 1
            reached = place >= 0
            place = np.searchsorted(mine, mine[place[reached]])
            every[starts[c] : starts[c + 1]] += np.bincount(
                place, weight[reached], minlength=len(mine)
            )
    result = np.full(num_classes, np.nan)
    for c in present:
        part = slice(starts[c], starts[c + 1])
        first = np.searchsorted(at[part], at[part])
        # From each on to the highest.
        true = np.cumsum(weights[part][::-1])[::-1][first]
        above = np.cumsum(every[part][::-1])[::-1][first]
        if not (above >= true * (1 - 1e-9)).all():
            raise ValueError(
                "Expected the same batches twice; received: other scores of class "
                f"{c} the second time"
            )
        result[c] = (weights[part] * true / above).sum() / weights[part].sum()
    return result


def mean_of_defined(values: np.ndarray) -> float:
    """The mean of average precisions, without those of absent classes."""
    if np.isnan(values).all():
        raise ValueError("Expected a class with examples; received: none")
    return float(np.nanmean(values))


def _each(batches, num_classes, sparse_labels):
    for batch in batches():
        labels, scores, weight = (*batch, None)[:3]
        if np.ndim(scores) != 2 or np.shape(scores)[1] != num_classes:
            raise ValueError(
                f"Expected scores (N, {num_classes}); received: {np.shape(scores)}"
            )
        yield _checked(labels, scores, weight, sparse_labels, may_be_empty=True)


def _checked(labels, scores, weight, sparse_labels, may_be_empty=False):
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
    if not np.isfinite(scores).all():
        raise ValueError("Expected finite scores; received: some that are not")
    if (weight < 0).any() or not (may_be_empty or weight.sum() > 0):
        raise ValueError(
            "Expected weights of at least 0, not all 0; received: "
            f"sample_weight with sum {weight.sum()}, minimum {weight.min(initial=0)}"
        )
    if not sparse_labels:
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(
                "Expected labels of 0 and 1; received: "
                f"{labels[~np.isin(labels, (0, 1))][0]}"
            )
        return labels > 0, scores, weight
    if labels.size and not -1 <= labels.min() <= labels.max() < scores.shape[1]:
        raise ValueError(
            f"Expected numbers of {scores.shape[1]} classes, or -1; "
            f"received: labels from {labels.min()} to {labels.max()}"
        )
    dense = np.zeros(scores.shape, bool)
    example, place = np.nonzero(labels >= 0)
    dense[example, labels[example, place]] = True
    return dense, scores, weight
