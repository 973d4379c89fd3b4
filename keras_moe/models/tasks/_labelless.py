"""Tasks whose loss needs no labels, with metrics of outputs and weights."""

from typing import Any

import keras
from keras import ops

from keras_moe._compat import mark_loss_as_built, track_loss_by
from keras_moe._types import Tensor
from keras_moe.models.base._model import Task
from keras_moe.models.loading._sources import ARCHITECTURE, ModelSource
from keras_moe.models.preprocessing.tokenizer import TextTokenizer
from keras_moe.models.tasks.base import MoETask


class WeightedLoss(keras.metrics.Mean):
    """Mean loss of all pairs or tokens; Keras would weigh batches by their size."""

    _last = None

    def update_state(self, loss, sample_weight=None):
        self._last = loss, sample_weight
        return super().update_state(loss, sample_weight)

    def weigh(self, weights: Tensor) -> None:
        """Reweights the last batch by the sum of its weights instead of its size."""
        # A tensor of one trace cannot be used in the next.
        last, self._last = self._last, None
        if weights is None or last is None:
            return
        loss, size = last
        weights = ops.cast(ops.convert_to_tensor(weights), self.dtype)
        super().update_state(loss, ops.sum(weights) - ops.cast(size, self.dtype))


class LabellessTask(MoETask, Task):
    """Base class of tasks that read texts and learn from their inputs only."""

    has_head = False
    has_metrics = False
    # Until compiled.
    _own_metrics: tuple[keras.metrics.Metric, ...] = ()
    _weighted_loss: Any = None

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "auto",
        loss: object = "auto",
        *,
        metrics: object = "auto",
        **kwargs,
    ) -> None:
        """Configures training; see `MoETask.compile`."""
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        # All metrics use weights, so both arguments mean the same.
        metrics = [*_checked(metrics), *_checked(kwargs.pop("weighted_metrics", None))]
        super().compile(optimizer, loss, metrics=None, **kwargs)
        if loss is not None:
            mark_loss_as_built(self)
        # Bypass attribute tracking: metrics are not part of the weights.
        object.__setattr__(self, "_own_metrics", tuple(metrics))
        object.__setattr__(self, "_weighted_loss", WeightedLoss(name="loss"))
        track_loss_by(self, self._weighted_loss)

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        if not config:
            return {}
        metrics = [keras.saving.serialize_keras_object(x) for x in self._own_metrics]
        return {**config, "metrics": None, "weighted_metrics": metrics}

    def _weighed(self, x, y, y_pred, sample_weight):
        """Returns what metrics get: targets, outputs and their weights."""
        raise NotImplementedError

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*super().metrics, *self._own_metrics]

    def compute_metrics(
        self, x: object, y: object, y_pred: Tensor, sample_weight: object = None
    ) -> dict[str, Any]:
        targets, outputs, weights = self._weighed(x, y, y_pred, sample_weight)
        self._weighted_loss.weigh(weights)
        for metric in self._own_metrics:
            metric.update_state(targets, outputs, weights)
        return self.get_metrics_result()


def _checked(metrics: object) -> list[keras.metrics.Metric]:
    checked: list[Any] = keras.tree.flatten(metrics or ())
    for metric in checked:
        if not isinstance(metric, keras.metrics.Metric):
            raise ValueError(
                "Expected metrics of embeddings or of log-likelihoods, such as "
                f"ContrastiveAccuracy() or Perplexity(); received: {metric!r}"
            )
    return checked


def check_tokenizer(tokenizer: object, backbone: object) -> None:
    if isinstance(tokenizer, TextTokenizer) and tokenizer.has_vocabulary:
        tokenizer.check_fits(backbone)


def without_large_tokenizer(source: ModelSource, config: dict, sizes: dict) -> dict:
    """The task's arguments, without a tokenizer that new weights are too small for."""
    tokenizer, names = config.get("preprocessor"), ("vocabulary_size", "max_length")
    if source.kind != ARCHITECTURE or not isinstance(tokenizer, TextTokenizer):
        return config
    fits = all(getattr(tokenizer, name) <= sizes[name] for name in names)
    return config if fits else {**config, "preprocessor": None}
