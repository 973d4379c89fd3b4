"""Metrics for `compile` against the exact functions of arrays."""

import keras
import numpy as np
import pytest

from keras_moe.evaluation import mean_average_precision, precision_at_1
from keras_moe.training import MeanAveragePrecision, PrecisionAt1

N, C = 50, 6


def drawn():
    """Labels, the numbers of these, logits, and weights that leave examples out."""
    rng = np.random.default_rng(0)
    labels = (rng.uniform(size=(N, C)) < 0.3).astype("float32")
    labels[:, 2] = 0
    sparse = np.full((N, C), -1, "int32")
    for row, mine in zip(sparse, labels):
        row[: int(mine.sum())] = np.flatnonzero(mine)
    logits = (rng.normal(size=(N, C)) + labels).astype("float32")
    weights = np.where(np.arange(N) % 7 == 3, 0, 1).astype("float32")
    return labels, sparse, logits, weights


def value(metric, labels, scores, weights=None):
    for at in range(0, N, 20):
        part = slice(at, at + 20)
        metric.update_state(
            labels[part], scores[part], None if weights is None else weights[part]
        )
    return float(metric.result())


@pytest.mark.parametrize("sparse_labels", [False, True])
def test_metrics_are_those_of_arrays(sparse_labels):
    dense, sparse, logits, weights = drawn()
    labels = sparse if sparse_labels else dense
    binned = MeanAveragePrecision(C, num_bins=16, sparse_labels=sparse_labels)
    # 40 / 16 = 2.5 is the width of a bin: many logits are tied.
    rounded = np.floor(np.clip((logits + 20) / 2.5, 0, 15))
    finer = MeanAveragePrecision(
        C, num_bins=4000, max_logit=5.0, sparse_labels=sparse_labels
    )
    top = PrecisionAt1(sparse_labels=sparse_labels)
    for weight in (None, weights):
        for metric in (binned, finer, top):
            metric.reset_state()
        expected = mean_average_precision(dense, rounded, weight)
        assert value(binned, labels, logits, weight) == pytest.approx(expected)
        exact = mean_average_precision(dense, logits, weight)
        assert value(finer, labels, logits, weight) == pytest.approx(exact, abs=1e-3)
        assert value(top, labels, logits, weight) == pytest.approx(
            precision_at_1(dense, logits, weight)
        )


def test_probabilities_are_their_logits():
    dense, _, logits, _ = drawn()
    metric = MeanAveragePrecision(C, from_logits=False)
    probabilities = 1 / (1 + np.exp(-logits))
    # Logits beyond the last bins, too.
    assert value(metric, dense, probabilities) == pytest.approx(
        value(MeanAveragePrecision(C), dense, logits), abs=2e-3
    )
    metric.reset_state()
    metric.update_state(dense[:2], np.array([[0.0] * C, [1.0] * C]))
    assert np.isfinite(float(metric.result()))


def test_configs_come_back():
    for metric in (
        PrecisionAt1(sparse_labels=True, name="p"),
        MeanAveragePrecision(
            3, num_bins=10, max_logit=2.0, from_logits=False, sparse_labels=True
        ),
    ):
        again = keras.metrics.deserialize(keras.metrics.serialize(metric))
        assert again.get_config() == metric.get_config()
    # Without positives there is nothing to average, and no number that is none.
    assert float(MeanAveragePrecision(3).result()) == 0.0
