"""Metrics of multi-label classification for `compile(weighted_metrics=...)`.

Axes: B batch, C classes, L labels of an example.
"""

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import DType
from keras_moe.losses.classification import counted, logits_of


@keras.saving.register_keras_serializable("keras_moe")
class PrecisionAt1(keras.metrics.Mean):
    """The share of examples whose top-scoring class is one of their labels.

    Examples without labels count as wrong.

    Args:
        sparse_labels: whether labels are class numbers (B, L), padded with -1, instead
            of vectors (B, C) that are positive for the example's classes.
        name: name of the metric.
        dtype: dtype of the metric's variables.

    Example:

    >>> from keras_moe.training import PrecisionAt1
    >>> metric = PrecisionAt1(sparse_labels=True)
    >>> scores = np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    >>> metric.update_state(np.array([[0, 2], [1, -1]]), scores)
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        sparse_labels: bool = False,
        name: str = "precision_at_1",
        dtype: DType | None = None,
    ):
        super().__init__(name=name, dtype=dtype)
        self.sparse_labels = _checks.check_bool("sparse_labels", sparse_labels)

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = _checked(y_true, y_pred, self.sparse_labels)
        top = ops.expand_dims(ops.argmax(y_pred, axis=-1), -1)
        if self.sparse_labels:
            hit = ops.any(ops.cast(y_true, "int32") == ops.cast(top, "int32"), axis=-1)
        else:
            hit = ops.take_along_axis(y_true, top, axis=-1)[:, 0] > 0
        return super().update_state(
            ops.cast(hit, self.dtype), _vector(sample_weight, y_pred)
        )

    def get_config(self):
        return {**super().get_config(), "sparse_labels": self.sparse_labels}


@keras.saving.register_keras_serializable("keras_moe")
class MeanAveragePrecision(keras.metrics.Metric):
    """Mean over classes of the average precision, in constant memory.

    Logits are rounded to bins (8 bytes per class and bin, 64 MB for 20,000 classes);
    logits in one bin are tied. Classes without positives are left out of the mean, and
    without any positives the result is 0. For exact values see
    `keras_moe.evaluation.mean_average_precision`.

    Args:
        num_classes: number of classes C.
        num_bins: number of bins.
        max_logit: the bins divide [-max_logit, max_logit] equally; logits beyond it
            fall into the outermost bins.
        from_logits: whether predictions are logits instead of probabilities.
        sparse_labels: see `PrecisionAt1`.
        name: name of the metric.
        dtype: dtype of the metric's variables.

    Example:

    >>> from keras_moe.training import MeanAveragePrecision
    >>> metric = MeanAveragePrecision(num_classes=2)
    >>> metric.update_state(np.eye(2), np.array([[2.0, 1.0], [-2.0, -1.0]]))
    >>> float(metric.result())
    0.75
    """

    def __init__(
        self,
        num_classes: int,
        *,
        num_bins: int = 400,
        max_logit: float = 20.0,
        from_logits: bool = True,
        sparse_labels: bool = False,
        name: str = "mean_average_precision",
        dtype: DType | None = None,
    ):
        super().__init__(name=name, dtype=dtype)
        self.num_classes = _checks.check_integer("num_classes", num_classes)
        self.num_bins = _checks.check_integer("num_bins", num_bins, minimum=2)
        self.max_logit = _checks.check_positive("max_logit", max_logit)
        self.from_logits = bool(from_logits)
        self.sparse_labels = _checks.check_bool("sparse_labels", sparse_labels)
        # Flat, for the scatter-add.
        size = (self.num_classes * self.num_bins,)
        self.positives = self.add_weight(size, "zeros", name="positives")
        self.examples = self.add_weight(size, "zeros", name="examples")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = _checked(y_true, y_pred, self.sparse_labels)
        y_pred = ops.cast(y_pred, "float32")
        weight = _vector(sample_weight, y_pred)
        if weight is None:
            weight = ops.ones_like(y_pred[:, 0])
        weight = ops.expand_dims(ops.cast(weight, self.dtype), -1)
        if not self.from_logits:
            y_pred = logits_of(y_pred)
        # Clipped to [0, num_bins) before the cast: infinities have no integer.
        share = (y_pred + self.max_logit) / (2.0 * self.max_logit)
        bins = ops.clip(share * self.num_bins, 0.0, self.num_bins - 1.0)
        first = ops.arange(self.num_classes, dtype="int32") * self.num_bins
        indices = ops.cast(bins, "int32") + first
        self._add(self.examples, indices, ops.broadcast_to(weight, ops.shape(indices)))
        if self.sparse_labels:
            labels = ops.cast(y_true, "int32")
            indices = ops.take_along_axis(indices, ops.maximum(labels, 0), axis=1)
            is_label = counted(labels)
        else:
            is_label = y_true > 0
        self._add(self.positives, indices, ops.where(is_label, weight, 0.0))

    def _add(self, counts, indices, values):
        flat = ops.segment_sum(
            ops.reshape(values, [-1]),
            ops.reshape(indices, [-1]),
            num_segments=self.num_classes * self.num_bins,
        )
        counts.assign_add(flat)

    def result(self):
        shape = (self.num_classes, self.num_bins)
        positives, examples = (
            ops.flip(ops.reshape(ops.convert_to_tensor(counts), shape), axis=1)
            for counts in (self.positives, self.examples)
        )
        # From the highest bin down: AP = sum over bins b of precision(b) positives(b),
        # divided by all positives; precision(b) counts all examples in bins >= b.
        hits, every = ops.cumsum(positives, axis=1), ops.cumsum(examples, axis=1)
        precision = ops.where(every > 0, hits / ops.maximum(every, 1e-30), 0.0)
        total = hits[:, -1]
        values = ops.sum(precision * positives, axis=1) / ops.where(
            total > 0, total, 1.0
        )
        is_there = ops.cast(total > 0, values.dtype)
        return ops.sum(values * is_there) / ops.maximum(ops.sum(is_there), 1.0)

    def get_config(self):
        own = {name: getattr(self, name) for name in _checks.argument_names(type(self))}
        return {**own, **super().get_config()}


def _checked(y_true, y_pred, sparse_labels):
    if sparse_labels:
        _checks.check_class_labels(y_true, y_pred.shape[-1], ignored=-1)
    y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
    fits = len(y_true.shape) == len(y_pred.shape) == 2
    if not fits or not (sparse_labels or y_true.shape[1] == y_pred.shape[1]):
        expected = "labels and predictions (batch, classes), or labels (batch, labels)"
        shapes = f"shapes {tuple(y_true.shape)} and {tuple(y_pred.shape)}"
        raise _checks.unfit(expected, shapes, sparse_labels=sparse_labels)
    return y_true, y_pred


def _vector(sample_weight, y_pred):
    """Returns sample weights as (B,); a scalar or one number per example is fine."""
    if sample_weight is None:
        return None
    weight = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if len(weight.shape) == 0:
        return ops.broadcast_to(weight, ops.shape(y_pred)[:1])
    return ops.reshape(weight, [-1])
