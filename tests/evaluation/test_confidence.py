"""Calibration and unknown inputs, against scikit-learn and by hand."""

import json

import numpy as np
import pytest

from keras_moe.evaluation import calibration, out_of_distribution


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


@pytest.mark.parametrize("digits", [1, 9])
def test_areas_are_those_of_scikit_learn(digits):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    # Rounded to a digit, many are equal.
    known, others = draw.normal(1, 1, 140).round(digits), draw.normal(size=90)
    others = others.round(digits)
    result = out_of_distribution(known, others)
    is_known = np.repeat([1, 0], [140, 90])
    scores = np.concatenate([known, others])
    expected = metrics.roc_auc_score(is_known, scores)
    assert result.auroc == pytest.approx(expected, abs=1e-9)
    fpr, tpr, limits = metrics.roc_curve(is_known, scores, drop_intermediate=False)
    first = np.flatnonzero(tpr >= 0.95)[0]
    assert result.fpr_at_95_tpr == pytest.approx(fpr[first], abs=1e-9)
    assert result.threshold == limits[first]
    assert json.loads(json.dumps(result.to_dict()))["auroc"] == result.auroc


def test_probabilities_stand_for_their_maximum():
    known, others = probabilities(20), probabilities(30, seed=1)
    expected = out_of_distribution(known.max(axis=1), others.max(axis=1))
    assert out_of_distribution(known, others) == expected
    assert out_of_distribution([3.0, 2.0], [1.0]).to_dict() == {
        "auroc": 1.0,
        "fpr_at_95_tpr": 0.0,
        "threshold": 2.0,
    }
