"""An adversary that keeps a sensitive attribute out of features.

Axes: B batch, D hidden, A values of the attribute.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer, check_not_negative


@keras.saving.register_keras_serializable("keras_moe")
class AttributeAdversary(keras.layers.Layer):
    """Predicts an attribute from features, which learn to confuse it.

    The logits train this layer alone: features get no gradient from them. While
    training, the layer adds the cross-entropy of its prediction with the uniform
    distribution, which trains the features alone.

    Args:
        num_values: A, number of values of the attribute.
        confusion_weight: weight of the added loss.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        features: (B, D).
        training: whether the loss is added.

    Output shape:
        (B, A), logits.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Turning a Blind Eye: Explicit Removal of Biases and Variation from Deep Neural
        Network Embeddings*, equations 2 and 3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import AttributeAdversary
    >>> tuple(AttributeAdversary(num_values=2)(np.ones((3, 8), "float32")).shape)
    (3, 2)
    """

    def __init__(self, num_values: int, confusion_weight: float = 1.0, **kwargs):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.num_values = check_integer("num_values", num_values, 2)
        self.confusion_weight = check_not_negative("confusion_weight", confusion_weight)

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.num_values),
            initializer="glorot_uniform",
        )
        self.bias = self.add_weight(
            name="bias", shape=(self.num_values,), initializer="zeros"
        )

    def call(self, features: Any, training: bool | None = None) -> Any:
        kernel, bias = (ops.convert_to_tensor(v) for v in (self.kernel, self.bias))
        if training and self.confusion_weight:
            confused = ops.matmul(features, ops.stop_gradient(kernel))
            confused = ops.log_softmax(confused + ops.stop_gradient(bias))
            self.add_loss(-self.confusion_weight * ops.mean(confused))
        return ops.matmul(ops.stop_gradient(features), kernel) + bias

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.num_values)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_values=self.num_values, confusion_weight=self.confusion_weight
        )
        return config
