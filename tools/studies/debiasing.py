"""Adversarial debiasing: features from which an attribute cannot be read.

This is section 3 of *Turning a Blind Eye: Explicit Removal of Biases and Variation from
Deep Neural Network Embeddings*, with which Table 2 of *Multilinear MoE* compares.

Axes: B batch, D hidden, A values of the attribute.
"""

from typing import Any

import keras
from keras import ops


class AttributeAdversary(keras.layers.Layer):
    """Predicts an attribute from features (B, D), which learn to confuse it.

    The logits (B, A) train this layer alone: features get no gradient from them. While
    training, the layer adds the cross-entropy of its prediction with the uniform
    distribution, which trains the features alone (equations 2 and 3).
    """

    def __init__(self, num_values: int, confusion_weight: float = 1.0, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.num_values, self.confusion_weight = num_values, confusion_weight

    def build(self, input_shape):
        shape = (input_shape[-1], self.num_values)
        self.kernel = self.add_weight(name="kernel", shape=shape)
        self.bias = self.add_weight(name="bias", shape=shape[1:], initializer="zeros")

    def call(self, features: Any, training: bool | None = None) -> Any:
        kernel, bias = (ops.convert_to_tensor(v) for v in (self.kernel, self.bias))
        if training and self.confusion_weight:
            confused = ops.matmul(features, ops.stop_gradient(kernel))
            confused = ops.log_softmax(confused + ops.stop_gradient(bias))
            self.add_loss(-self.confusion_weight * ops.mean(confused))
        return ops.matmul(ops.stop_gradient(features), kernel) + bias


def adversarial_debiasing(
    classifier: keras.Model, num_values: int = 2, confusion_weight: float = 1.0
) -> keras.Model:
    """A compiled model that trains a compiled classifier against an adversary.

    The classifier learns its task while its features learn to confuse the adversary,
    which learns to tell the attribute from them. The model shares all weights with the
    classifier and has the outputs "predictions" and "attribute":
    `fit(images, {"predictions": labels, "attribute": attributes})`.
    """
    adversary = AttributeAdversary(num_values, confusion_weight, name="attribute")
    model = keras.Model(
        classifier.input,
        {
            "predictions": classifier.output,
            "attribute": adversary(classifier.features),
        },
    )
    model.compile(
        optimizer=classifier.optimizer,
        loss={
            "predictions": classifier.loss,
            "attribute": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        metrics={"attribute": keras.metrics.SparseCategoricalAccuracy("accuracy")},
    )
    return model
