"""Contrastive metrics for `compile`, on embeddings. Axes: B pairs."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe.losses._pairs import NEVER, Chunks, check_similarity, pairs_of, positives


@keras.saving.register_keras_serializable("keras_moe")
class ContrastiveAccuracy(keras.metrics.Mean):
    """Fraction of images and texts whose nearest counterpart is their own.

    An image is correct if one of its own texts is nearer than all other texts of the
    batch, and vice versa. Ties are wrong, so constant embeddings get 0 (unlike in
    `keras_moe.evaluation.contrastive_accuracy`). Pairs with equal image or text ids, if
    given, count as each other's own, and padding is ignored. Larger batches are harder:
    compare results at the same batch size.

    Args:
        chunk_size: number of texts to compare at a time, to save memory; None for all.
        name: name of the metric.
        dtype: dtype of the metric's variables.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ContrastiveAccuracy
    >>> metric = ContrastiveAccuracy()
    >>> x = np.eye(4, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x[[0, 1, 3, 2]]}
    >>> metric.update_state(None, outputs)
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        chunk_size: int | None = None,
        name: str = "contrastive_accuracy",
        dtype: Any = None,
    ):
        super().__init__(name=name, dtype=dtype)
        self.chunk_size = check_similarity("float32", chunk_size)

    def update_state(self, y_true, y_pred, sample_weight=None):
        # Metrics need no gradient.
        images, texts = (
            ops.stop_gradient(ops.convert_to_tensor(y_pred[f"{modality}_embeddings"]))
            for modality in ("image", "text")
        )
        pairs = pairs_of(images, texts, **(y_true or {}), sample_weight=sample_weight)
        of_images, of_texts = _hits(pairs, self.chunk_size)
        return super().update_state(0.5 * (of_images + of_texts), pairs.weights)

    def get_config(self):
        return {**super().get_config(), "chunk_size": self.chunk_size}


class WeightedLoss(keras.metrics.Mean):
    """Mean loss of all pairs or tokens; Keras would weigh batches by their size."""

    _last = None

    def update_state(self, loss, sample_weight=None):
        self._last = loss, sample_weight
        return super().update_state(loss, sample_weight)

    def weigh(self, weights: Any) -> None:
        """Reweights the last batch by the sum of its weights instead of its size."""
        # A tensor of one trace cannot be used in the next.
        last, self._last = self._last, None
        if weights is None or last is None:
            return
        loss, size = last
        weights = ops.cast(ops.convert_to_tensor(weights), self.dtype)
        super().update_state(loss, ops.sum(weights) - ops.cast(size, self.dtype))


def check_metrics(metrics: Sequence | None) -> list[keras.metrics.Metric]:
    """Returns a list of metrics, which are called with all outputs of a task."""
    metrics = keras.tree.flatten(metrics or ())
    for metric in metrics:
        if not isinstance(metric, keras.metrics.Metric):
            raise ValueError(
                "Expected metrics of embeddings or of log-likelihoods, such as "
                f"ContrastiveAccuracy() or Perplexity(); received: {metric!r}"
            )
    return metrics


def _hits(pairs, chunk_size):
    """Whether images and texts are correct, float32 (B,) each."""
    images, by_text = pairs.images, [pairs.texts, pairs.counted, *pairs.keys]
    none = ops.zeros_like(pairs.counted) + NEVER
    if chunk_size is None:
        own, other, of_texts = _compared(pairs, images, *by_text)
        return ops.cast(own > other, "float32"), of_texts
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    by_text = [chunks.pad(x) for x in by_text]

    def step(number, carry):
        own, other, of_texts = carry
        part = (chunks.part(x, number) for x in by_text)
        part_own, part_other, part_of_texts = _compared(pairs, images, *part)
        return (
            ops.maximum(own, part_own),
            ops.maximum(other, part_other),
            chunks.put(of_texts, number, part_of_texts),
        )

    own, other, of_texts = ops.fori_loop(
        0, chunks.count, step, (none, none, chunks.zeros())
    )
    return ops.cast(own > other, "float32"), chunks.unpad(of_texts)


def _compared(pairs, images, texts, counted, *keys):
    """Returns the best own and other similarities, and which texts are correct."""
    similarity = ops.matmul(images, ops.transpose(texts))
    is_there = ops.logical_and(
        ops.expand_dims(pairs.counted > 0, 1), ops.expand_dims(counted > 0, 0)
    )
    positive = positives(pairs.keys, keys)
    own = ops.where(ops.logical_and(is_there, positive), similarity, NEVER)
    other = ops.where(
        ops.logical_and(is_there, ops.logical_not(positive)), similarity, NEVER
    )
    of_texts = ops.max(own, axis=0) > ops.max(other, axis=0)
    return (ops.max(own, axis=1), ops.max(other, axis=1), ops.cast(of_texts, "float32"))


def weighable_labels(inputs: Any, labels: Any, sample_weight: Any) -> Any:
    """Returns labels with which Keras keeps sample weights: it drops them without."""
    if sample_weight is None or not isinstance(inputs, dict):
        return labels
    number = len(next(iter(inputs.values())))
    if len(sample_weight) != number:
        raise ValueError(
            f"Expected a sample_weight for each of {number} pairs; received: "
            f"{len(sample_weight)}"
        )
    # A distinct image per pair is the default.
    return {"image_ids": np.arange(number)} if labels is None else labels


def one_weight(sample_weight: Any) -> Any:
    """Returns one set of sample weights; Keras repeats them for each label."""
    if isinstance(sample_weight, dict):
        return next(iter(sample_weight.values()))
    return sample_weight
