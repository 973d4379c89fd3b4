"""Weighted nearest neighbours, against scikit-learn and by hand."""

import importlib

import keras
import numpy as np
import pytest

from keras_moe import data, models
from keras_moe.evaluation import (
    extract_features,
    nearest_neighbours,
)


def draw(examples, dim=6, num_classes=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=examples)
    centres = np.random.default_rng(9).normal(size=(num_classes, dim))
    return centres[labels] + rng.normal(size=(examples, dim)), labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (90, 0.5)])
def test_scores_are_those_of_scikit_learn(k, temperature, monkeypatch):
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test = draw(90), draw(50, seed=1)
    reference = neighbors.KNeighborsClassifier(
        k, metric="cosine", weights=lambda x: np.exp((1 - x) / temperature)
    ).fit(*train)
    # 7 test examples at a time.
    module = importlib.import_module(nearest_neighbours.__module__)
    monkeypatch.setattr(module, "_CHUNK", 7 * 90)
    result = nearest_neighbours(*train, *test, k, temperature)
    expected = reference.predict_proba(test[0])
    np.testing.assert_allclose(result.scores, expected, atol=1e-9)
    np.testing.assert_array_equal(result.predictions, reference.predict(test[0]))
    assert result.accuracy == reference.score(*test)


def test_votes_by_hand():
    # Cosines 1, 0.6 and 0.6, whatever the lengths, and of the equal ones the first.
    train = np.array([[0.0, 3.0], [8.0, 6.0], [-4.0, 3.0]])
    result = nearest_neighbours(train, [2, 0, 1], [[0.0, 7.0]], [0], 2, 0.1)
    votes = np.exp([6.0, 0.0, 10.0])
    votes[1] = 0.0
    np.testing.assert_allclose(result.scores[0], votes / votes.sum(), rtol=1e-9)
    assert (result.accuracy, result.predictions.tolist()) == (0.0, [2])
    # Nothing overflows.
    cold = nearest_neighbours(train, [2, 0, 1], [[0.0, 7.0]], [2], 3, 1e-6)
    np.testing.assert_array_equal(cold.scores, [[0.0, 0.0, 1.0]])


@pytest.mark.every_backend
def test_digits_by_a_trained_model():
    model = models.from_preset("vmoe_digits")
    shape = model.backbone.image_shape
    train, test = (data.load("digits", split, shape, 64) for split in ("train", "test"))
    pooled = keras.Model(model.backbone.input, model.backbone.features["pooled"])
    train, test = (extract_features(pooled, x, verbose=0) for x in (train, test))
    result = nearest_neighbours(*train, *test, k=5)
    assert result.accuracy > 0.95
    assert result.scores.shape == (450, 10)
