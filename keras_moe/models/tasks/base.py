"""Base class of tasks: a backbone and the layers on top of it. Axes: B batch."""

import functools
import os
from collections.abc import Callable
from typing import Any, Self

import keras
import keras_hub
from keras import ops

from keras_moe import _checks, _compat
from keras_moe._types import Config, Tensor
from keras_moe.models.base._input_checks import check_inputs
from keras_moe.models.base._model import MoEModel, Task
from keras_moe.models.loading._sources import ARCHITECTURE, ModelSource, TaskConfig
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.preprocessing.tokenizer import TextTokenizer
from keras_moe.models.saving._lora import settle_policies, training_config
from keras_moe.models.saving._weights_file import checked_weights, save_weights
from keras_moe.routers import TokenChoiceRouter

# Its methods are called past those of a task's other base classes.
_HUB_TASK: Any = keras_hub.models.Task


class MoETask(MoEModel):
    """Base class of tasks, such as `ImageClassifier` and custom ones.

    A task's second base class is `keras_hub.models.Task` or one of KerasHub's tasks, so
    that KerasHub's `from_preset` can load it too.

    A subclass defines `task_name` (for `from_preset`), `backbone_cls`, `get_config` and
    a constructor that sets `self.backbone` and `self.preprocessor`, connects its layers
    and passes the symbolic tensors on. Override `default_loss`, `default_metrics`,
    `check_labels`, `config_from` and `describe_parts` as needed.

    Args:
        inputs: symbolic input, or dict of inputs by name.
        outputs: symbolic outputs.
        features: symbolic features that the outputs are computed from, or a dict.
        routing: dict from block name to symbolic `Routing`.
        **kwargs: arguments of `keras_hub.models.Task`.

    Example:

    >>> import keras_hub
    >>> from keras_moe.models import ImageClassifier, MoETask
    >>> class Retrieval(keras_hub.models.Task, MoETask):
    ...     pass
    Traceback (most recent call last):
    ...
    TypeError: Expected class Retrieval(MoETask, keras_hub.models.Task); received: ...
    """

    task_name: str
    backbone: Any
    preprocessor: Any
    backbone_cls: type | None
    _features: Any
    _routing: dict[str, Any]
    # Whether the head has weights, which are saved in a separate file.
    has_head = True
    # Whether metrics compare outputs with labels.
    has_metrics = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        parents, task = cls.__mro__, _HUB_TASK
        if task not in parents or parents.index(task) < parents.index(MoETask):
            raise TypeError(
                f"Expected class {cls.__name__}(MoETask, keras_hub.models.Task); "
                f"received: bases={[base.__name__ for base in cls.__bases__]}"
            )

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        """Task arguments from the source, overrides and the backbone's arguments."""
        return TaskConfig({**source.task_config(), **overrides})

    @staticmethod
    def describe_parts(
        backbone_config: dict, num_tokens: int, dim: int, **config: Any
    ) -> list[Part]:
        """Parts and costs the task adds to a backbone with N tokens of size `dim`."""
        return []

    def __new__(cls, *args, **kwargs):
        if args or kwargs:
            # Keras makes one of each base class without arguments.
            _checks.check_concrete(cls, MoETask, "ViTImageClassifier")
        # Another thread may be changing the classes.
        with _compat.ONE_AT_A_TIME:
            return super().__new__(cls, *args, **kwargs)

    def __init__(
        self, inputs: object, outputs: Any, features: Any, routing: dict, **kwargs
    ):
        # Keras would set it before it knows the layers.
        trainable = _checks.check_bool("trainable", kwargs.pop("trainable", True))
        # KerasHub's own tasks would build their own head.
        with _compat.ONE_AT_A_TIME:
            if not isinstance(self, _compat.Functional):
                # Keras would do it once for each base class that extends this one.
                _compat.inject_functional_model_class(_HUB_TASK)
            _compat.init_task(self, inputs=inputs, outputs=outputs, **kwargs)
        _compat.order_layers(self)
        settle_policies(self)
        if not trainable:
            self.trainable = False
        # Bypass attribute tracking, which would wrap these dicts.
        object.__setattr__(self, "_features", features)
        object.__setattr__(self, "_routing", routing)

    @property
    def features(self) -> Any:
        """The symbolic features that the outputs are computed from."""
        return self._features

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` by block name; a muMoE head's is "head", (B, 1, E)."""
        return self._routing

    def get_config(self):
        return {**_HUB_TASK.get_config(self), **training_config(self)}

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Creates a task from the result of `get_config`."""
        config = dict(config)
        if isinstance(config.get("preprocessor"), dict):
            # KerasHub accepts only layers.
            config["preprocessor"] = keras.saving.deserialize_keras_object(
                config["preprocessor"]
            )
        return super().from_config(config)

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "auto",
        loss: object = "auto",
        *,
        metrics: object = "auto",
        **kwargs,
    ) -> None:
        """Configures training, with defaults for this task.

        Args:
            optimizer: `"auto"` is AdamW with learning rate 3e-4, weight decay 1e-4 and
                gradients clipped to global norm 1 (except for half-precision weights).
            loss: `"auto"` is `default_loss()`.
            metrics: `"auto"` is `default_metrics(loss)`.
            **kwargs: arguments of `keras.Model.compile`.
        """
        if isinstance(optimizer, str) and optimizer == "auto":
            # TensorFlow cannot compute a joint norm of bfloat16 and float32 gradients.
            is_float32 = self.backbone.dtype_policy.variable_dtype == "float32"
            optimizer = keras.optimizers.AdamW(
                3e-4, weight_decay=1e-4, global_clipnorm=1.0 if is_float32 else None
            )
        if isinstance(loss, str) and loss == "auto":
            loss = self.default_loss()
        loss = self._checked_loss(loss)
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        if metrics is None and self.has_metrics:
            # With None Keras would keep the previous metrics.
            metrics = []
        _HUB_TASK.compile(
            self, optimizer=optimizer, loss=loss, metrics=metrics, **kwargs
        )
        made: Any = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        for layer in _compat.flatten_layers(self):
            if isinstance(layer, TokenChoiceRouter):
                # A selection bias moves once a step, too.
                layer.passes_per_step = made.gradient_accumulation_steps or 1
                if layer.built and layer.selection_bias_rate is not None:
                    # The new optimizer has accumulated nothing.
                    layer.num_passes.assign(0.0)

    def _checked_loss(self, loss):
        """Returns the loss that Keras gets; raises ValueError if it does not fit."""
        return loss

    def compile_from_config(self, config: dict) -> None:
        """Compiles a loaded model, which Keras skips if `compile` is overridden."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            # So that the optimizer's saved state can be loaded.
            self.optimizer.build(self.trainable_variables)

    def default_loss(self) -> Any:
        """Returns the loss for `compile(loss="auto")`; None by default."""
        return None

    def default_metrics(self, loss: object) -> list:
        """Returns the metrics for `compile(metrics="auto")`."""
        return []

    def label_spec(self) -> keras.KerasTensor | None:
        """Returns the symbolic labels of a batch; None for tasks without labels."""
        return None

    def check_labels(self, labels: object) -> None:
        """Raises ValueError if labels, of any type that `fit` accepts, do not fit."""

    def _check_inputs(self, inputs, labels=None):
        # A KerasHub preprocessor takes other inputs and creates the model's.
        if not self._has_keras_hub_preprocessor():
            check_inputs(self, inputs)
        if labels is not None:
            self.check_labels(labels)

    def _training_method(self, name: str) -> Callable:
        # KerasHub's `fit` converts all data to one kind of dataset so that it can map a
        # preprocessor: it does not accept `PyDataset`, `DataLoader` or generators and
        # does not shuffle arrays. Use it only for KerasHub's preprocessors.
        owner = keras.Model
        if self._has_keras_hub_preprocessor():
            owner = _HUB_TASK
        return functools.partial(getattr(owner, name), self)

    def preprocess_samples(
        self, x: object, y: object = None, sample_weight: object = None
    ) -> Any:
        """Applies a KerasHub preprocessor, if there is one."""
        if self._has_keras_hub_preprocessor():
            return _HUB_TASK.preprocess_samples(self, x, y, sample_weight)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def save_task_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the head without optimizer state, which KerasHub would include."""
        save_weights(self, filepath, objects_to_skip=_not_the_head(self))

    def load_task_weights(self, filepath: str | os.PathLike) -> None:
        """Loads the head's weights."""
        skipped = _not_the_head(self)
        with checked_weights(filepath):
            keras.saving.load_weights(self, filepath, objects_to_skip=skipped)

    def save_assets(self, dir_path: str) -> None:
        super().save_assets(dir_path)
        if isinstance(self.preprocessor, TextTokenizer):
            self.preprocessor.tokenizer.save_assets(dir_path)

    def load_assets(self, dir_path: str) -> None:
        if isinstance(self.preprocessor, TextTokenizer):
            self.preprocessor.tokenizer.load_assets(dir_path)

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Adds LoRA to the backbone, before `fit`; the head stays trainable."""
        self.backbone.enable_lora(rank, target_layer_names)

    def _has_keras_hub_preprocessor(self):
        """Whether a KerasHub preprocessor creates the model's inputs."""
        return isinstance(self.preprocessor, keras_hub.models.Preprocessor)


def check_task(
    task: MoETask,
    owner: type,
    backbone: object,
    kwargs: dict,
    family: type | None = None,
) -> None:
    """Checks the backbone and the names of further arguments of a constructor."""
    names = ["name", "trainable", "compile"]
    _checks.check_argument_names(
        kwargs, names, type(task).__name__, _checks.argument_names(owner)
    )
    wanted = task.backbone_cls or family
    if wanted is not None and not isinstance(backbone, wanted):
        raise _checks.unfit(f"backbone to be a {wanted.__name__}", backbone=backbone)


def _not_the_head(task):
    skipped = _compat.flatten_layers(task.backbone)
    # None with compile=False.
    optimizer = getattr(task, "optimizer", None)
    return skipped if optimizer is None else [*skipped, optimizer]


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

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs):
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        # All metrics use weights, so both arguments mean the same.
        metrics = [*_checked(metrics), *_checked(kwargs.pop("weighted_metrics", None))]
        super().compile(optimizer, loss, metrics=None, **kwargs)
        if loss is not None:
            _compat.mark_loss_as_built(self)
        # Bypass attribute tracking: metrics are not part of the weights.
        object.__setattr__(self, "_own_metrics", tuple(metrics))
        object.__setattr__(self, "_weighted_loss", WeightedLoss(name="loss"))
        _compat.track_loss_by(self, self._weighted_loss)

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
