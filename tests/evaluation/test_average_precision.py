import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from keras_moe.evaluation import (
    average_precision,
    mean_average_precision,
    precision_at_1,
)

N, C = 60, 7


def drawn(seed=0, decimals=1):
    """Labels, the numbers of these, scores with ties, and weights."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(size=(N, C)) < 0.3
    # A class without examples, and an example without classes.
    labels[:, 2] = False
    labels[0] = False
    sparse = np.full((N, C + 1), -1)
    for row, mine in zip(sparse, labels):
        row[: mine.sum()] = np.flatnonzero(mine)
    scores = np.round(rng.normal(size=(N, C)) + labels, decimals)
    weights = rng.integers(0, 3, N).astype(float)
    return labels, sparse, scores, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_average_precision_is_that_of_scikit_learn(seed, weighted):
    labels, sparse, scores, weights = drawn(seed)
    weights = weights if weighted else None
    expected = np.full(C, np.nan)
    for c in np.flatnonzero(labels.any(axis=0)):
        expected[c] = average_precision_score(
            labels[:, c], scores[:, c], sample_weight=weights
        )
    actual = average_precision(labels, scores, weights)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, equal_nan=True)
    np.testing.assert_array_equal(
        average_precision(sparse, scores, weights, sparse_labels=True), actual
    )
    mean = mean_average_precision(labels, scores, weights)
    assert mean == pytest.approx(np.nanmean(expected), rel=1e-12)


def test_precision_at_1():
    labels, sparse, scores, weights = drawn(decimals=9)
    hits = [labels[n, np.argmax(scores[n])] for n in range(N)]
    assert precision_at_1(labels, scores) == pytest.approx(np.mean(hits))
    expected = np.average(hits, weights=weights)
    assert precision_at_1(labels, scores, weights) == pytest.approx(expected)
    assert precision_at_1(sparse, scores, weights, True) == pytest.approx(expected)
