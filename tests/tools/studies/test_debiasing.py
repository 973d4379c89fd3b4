"""Features against an adversary: who learns what from whom."""

import keras
import numpy as np
from keras import ops

from tests.gradients import gradient
from tools.studies.mumoe_editing import AttributeAdversary, fairness_metrics


def test_fairness_by_hand():
    #          target 1, attribute 0 | 1, 1    | 0, 0 | 0, 1
    targets = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    attributes = np.array([0, 0, 0, 0, 1, 1, 0, 0, 1, 1])
    predictions = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 1])
    actual = fairness_metrics(predictions, targets, attributes)
    np.testing.assert_allclose(actual.accuracies, [[1.0, 0.5], [0.75, 0.5]])
    assert actual.counts.tolist() == [[2, 2], [4, 2]]
    assert actual.equality_of_opportunity == 0.25
    np.testing.assert_allclose(actual.std_bias, np.std([1.0, 0.5, 0.75, 0.5]))
    assert (actual.max_min, actual.accuracy) == (0.5, 0.7)


def test_logits_train_the_adversary_and_confusion_the_features():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(5, 4)).astype("float32")
    layer = AttributeAdversary(3, confusion_weight=0.5)
    layer.build(features.shape)
    kernel, bias = (generator.normal(size=v.shape) for v in layer.weights)
    kernel, bias = kernel.astype("float32"), bias.astype("float32")
    cotangent = generator.normal(size=(5, 3)).astype("float32")

    def loss(features, kernel, bias, own, training):
        with keras.StatelessScope(
            list(zip(layer.weights, (kernel, bias))), collect_losses=True
        ) as scope:
            logits = layer.call(features, training=training)
        own = own * ops.sum(ops.multiply(logits, cotangent))
        return own + sum(scope.losses) if scope.losses else own

    of_logits = gradient(lambda *x: loss(*x, 1.0, False), features, kernel, bias)
    np.testing.assert_array_equal(of_logits[0], 0.0)
    np.testing.assert_allclose(of_logits[1], features.T @ cotangent, rtol=1e-4)
    np.testing.assert_allclose(of_logits[2], cotangent.sum(axis=0), rtol=1e-4)
    of_loss = gradient(lambda *x: loss(*x, 0.0, True), features, kernel, bias)
    np.testing.assert_array_equal(of_loss[1], 0.0)
    np.testing.assert_array_equal(of_loss[2], 0.0)
    # Cross-entropy with the uniform distribution: softmax minus 1 / A.
    logits = features @ kernel + bias
    gates = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = 0.5 * (gates - 1 / 3) @ kernel.T / 5
    np.testing.assert_allclose(of_loss[0], expected, rtol=1e-3, atol=1e-6)
