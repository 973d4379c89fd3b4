"""Losses of classification heads."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("keras_moe")
class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy of each class's logit, summed over classes.

    The loss of the multi-label heads of V-MoE and of JFT-like data. Keras's
    `BinaryCrossentropy` averages over classes instead, which at 1,000 classes
    makes it a thousand times smaller than the auxiliary losses beside it.

    Args:
        from_logits: whether predictions are logits; otherwise probabilities.
        label_smoothing: s; targets become `y (1 - s) + s / 2`.
        reduction: see `keras.losses.Loss`.
        name: the loss's name.
        dtype: see `keras.losses.Loss`.

    Call arguments:
        y_true: (batch, classes), targets in [0, 1].
        y_pred: (batch, classes), logits or probabilities.

    Raises:
        ValueError: if `label_smoothing` is not in [0, 1).

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import SigmoidCrossentropy
    >>> loss = SigmoidCrossentropy()(np.ones((1, 2)), np.zeros((1, 2)))
    >>> round(float(loss), 4)  # two classes, log 2 each
    1.3863
    """

    def __init__(
        self,
        from_logits: bool = True,
        label_smoothing: float = 0.0,
        reduction: str = "sum_over_batch_size",
        name: str = "sigmoid_crossentropy",
        dtype: Any = None,
    ):
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                "Expected label_smoothing in [0, 1); "
                f"received: label_smoothing={label_smoothing}"
            )
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        if tuple(y_true.shape)[1:] != tuple(y_pred.shape)[1:]:
            raise ValueError(
                "Expected targets of shape (batch, classes), as the logits'; received: "
                f"y_true.shape={tuple(y_true.shape)}, "
                f"y_pred.shape={tuple(y_pred.shape)}"
            )
        s = self.label_smoothing
        y_true = y_true * (1.0 - s) + 0.5 * s
        if not self.from_logits:
            tiny = keras.config.epsilon()
            y_pred = ops.clip(y_pred, tiny, 1.0 - tiny)
            return -ops.sum(
                y_true * ops.log(y_pred) + (1.0 - y_true) * ops.log(1.0 - y_pred),
                axis=-1,
            )
        # softplus(x) - x y is -y log sigmoid(x) - (1 - y) log(1 - sigmoid(x)).
        return ops.sum(ops.softplus(y_pred) - y_pred * y_true, axis=-1)

    def get_config(self):
        config = super().get_config()
        config.update(
            from_logits=self.from_logits, label_smoothing=self.label_smoothing
        )
        return config
