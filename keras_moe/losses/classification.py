"""Losses of classification heads with several labels."""

import keras
from keras import ops

from keras_moe._checks import check_class_labels, unfit
from keras_moe._types import DType, Tensor


@keras.saving.register_keras_serializable("keras_moe")
class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy of each class's logit, summed over classes, as in V-MoE.

    Keras's `BinaryCrossentropy` averages over classes instead, which for 1,000 classes
    makes it a thousand times smaller relative to the auxiliary losses.

    Args:
        from_logits: whether predictions are logits; otherwise probabilities.
        reduction: reduction of `keras.losses.Loss`.
        name: name of the loss.
        dtype: dtype of `keras.losses.Loss`.

    Call arguments:
        y_true: (batch, classes), targets in [0, 1].
        y_pred: (batch, classes), logits or probabilities.

    Example:

    >>> from keras_moe.losses import SigmoidCrossentropy
    >>> loss = SigmoidCrossentropy()(np.ones((1, 2)), np.zeros((1, 2)))
    >>> round(float(loss), 4)  # two classes, log 2 each
    1.3863
    """

    def __init__(
        self,
        from_logits: bool = True,
        reduction: str = "sum_over_batch_size",
        name: str = "sigmoid_crossentropy",
        dtype: DType | None = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.from_logits = from_logits

    def call(self, y_true, y_pred):
        if tuple(y_true.shape)[1:] != tuple(y_pred.shape)[1:]:
            shapes = f"shapes {tuple(y_true.shape)} and {tuple(y_pred.shape)}"
            raise unfit("targets of shape (batch, classes), as the logits'", shapes)
        if not self.from_logits:
            y_pred = logits_of(y_pred)
        # softplus(x) - x y is -y log sigmoid(x) - (1 - y) log(1 - sigmoid(x)).
        return ops.sum(ops.softplus(y_pred) - y_pred * y_true, axis=-1)

    def get_config(self):
        return {**super().get_config(), "from_logits": self.from_logits}


@keras.saving.register_keras_serializable("keras_moe")
class SparseSigmoidCrossentropy(SigmoidCrossentropy):
    """`SigmoidCrossentropy` for labels given as class indices, without one-hot vectors.

    Args:
        dtype: float32 or float64; all other arguments are those of
            `SigmoidCrossentropy`.

    Call arguments:
        y_true: (batch, labels), class indices, padded with -1. A repeated index counts
            once; an index out of range makes the loss NaN.
        y_pred: (batch, classes), logits or probabilities.

    Example:

    >>> from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
    >>> logits = np.array([[1.0, -2.0, 0.5]])
    >>> sparse = SparseSigmoidCrossentropy()(np.array([[0, 2, -1, -1]]), logits)
    >>> dense = SigmoidCrossentropy()(np.array([[1.0, 0.0, 1.0]]), logits)
    >>> bool(abs(sparse - dense) < 1e-6)
    True
    """

    def __init__(
        self,
        from_logits: bool = True,
        reduction: str = "sum_over_batch_size",
        name: str = "sparse_sigmoid_crossentropy",
        dtype: DType | None = None,
    ):
        super().__init__(from_logits, reduction, name, dtype)
        # Keras casts labels, too: bfloat16 turns 257 into 256.
        if self.dtype not in ("float32", "float64"):
            expected = "dtype float32 or float64, in which numbers of classes are exact"
            raise unfit(expected, dtype=self.dtype)

    def __call__(self, y_true, y_pred, sample_weight=None):
        # A graph cannot raise an error for an unknown class.
        check_class_labels(y_true, y_pred.shape[-1], ignored=-1)
        return super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true, y_pred):
        labels = ops.cast(y_true, "int32")
        if not self.from_logits:
            y_pred = logits_of(y_pred)
        # -(y log p + (1 - y) log(1 - p)), where log p = log(1 - p) + logit.
        last = y_pred.shape[-1] - 1
        chosen = ops.take_along_axis(y_pred, ops.clip(labels, 0, last), axis=1)
        chosen = ops.where(labels > last, float("nan"), chosen)
        chosen = ops.sum(ops.where(counted(labels), chosen, 0.0), axis=-1)
        return ops.sum(ops.softplus(y_pred), axis=-1) - chosen


def logits_of(probabilities: Tensor) -> Tensor:
    """The logits of probabilities, of which 0 and 1 are moved by Keras's epsilon."""
    tiny = keras.config.epsilon()
    probabilities = ops.clip(probabilities, tiny, 1.0 - tiny)
    return ops.log(probabilities) - ops.log(1.0 - probabilities)


def counted(labels: Tensor) -> Tensor:
    """Booleans (batch, labels), False for padding and for repeated numbers."""
    same = ops.equal(ops.expand_dims(labels, 2), ops.expand_dims(labels, 1))
    earlier = ops.arange(labels.shape[1])
    earlier = ops.expand_dims(earlier, 0) < ops.expand_dims(earlier, 1)
    repeated = ops.any(ops.logical_and(same, earlier), axis=-1)
    return ops.logical_and(labels >= 0, ops.logical_not(repeated))
