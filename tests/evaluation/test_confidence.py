"""Calibration, against scikit-learn and by hand."""

import json

import numpy as np
import pytest

from keras_moe.evaluation import calibration


def probabilities(examples=200, num_classes=5, seed=0):
    logits = 2 * np.random.default_rng(seed).normal(size=(examples, num_classes))
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def test_likelihood_and_brier_score_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    given = probabilities()
    given[0] = [0, 1, 0, 0, 0]
    labels = np.random.default_rng(1).integers(5, size=200)
    labels[0] = 0
    result = calibration(given, labels)
    expected = metrics.log_loss(labels, given, labels=range(5))
    assert result.nll == pytest.approx(expected, abs=1e-9)
    expected = metrics.brier_score_loss(
        labels, given, labels=range(5), scale_by_half=False
    )
    assert result.brier == pytest.approx(expected, abs=1e-9)


def test_calibration_error_by_hand():
    # Confidences 0.5 (the upper end of a bin), 0.75, 1 and 1, in bins of a quarter.
    given = [[0.5, 0.5], [0.25, 0.75], [1, 0], [1, 0]]
    result = calibration(given, [0, 0, 0, 1], num_bins=4)
    assert result.counts.tolist() == [0, 1, 1, 2]
    assert result.confidences.tolist() == [0, 0.5, 0.75, 1]
    assert result.accuracies.tolist() == [0, 1, 0, 0.5]
    assert result.ece == (0.5 + 0.75 + 2 * 0.5) / 4
    assert result.brier == (0.5 + 2 * 0.75**2 + 0 + 2) / 4
    assert json.loads(json.dumps(result.to_dict()))["counts"] == [0, 1, 1, 2]
    assert result.table().row_count == 3
