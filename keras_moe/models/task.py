"""The base of all tasks: a backbone, the layers on top of it, and their training.

Axes: B batch.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import keras_hub

from keras_moe.compat import flatten_layers
from keras_moe.models.adaptation import settle_policies
from keras_moe.models.description import Part
from keras_moe.models.input_checks import check_inputs
from keras_moe.models.model import ONE_AT_A_TIME, MoEModel
from keras_moe.models.source import ModelSource, TaskConfig
from keras_moe.models.weights_file import checked_weights, save_weights


class MoETask(MoEModel):
    """A backbone with what a task adds to it, ready for `fit`.

    This is the base of `ImageClassifier` and of custom tasks. The second base of a
    task is `keras_hub.models.Task` or one of KerasHub's tasks, whose `from_preset` then
    loads it, too. (This class is no Keras model itself: Keras cannot build a functional
    model whose class inherits from `keras.Model` along two paths.)

    A subclass has `task_name`, by which `from_preset` takes it, and `backbone_cls`; a
    constructor, which sets `self.backbone` and `self.preprocessor`, connects the
    layers, and hands the symbolic results to this one; and `get_config`. It overrides
    `default_loss`, `default_metrics`, `check_labels`, `config_from` and
    `describe_parts` where the ones here do not fit.

    Args:
        inputs: symbolic inputs: one, or a dict by name.
        outputs: symbolic outputs.
        features: symbolic features that the outputs follow from: one, or a dict.
        routing: symbolic `Routing` of each MoE block, by the block's name.
        **kwargs: arguments of `keras_hub.models.Task`.

    Example:

    >>> import keras_hub
    >>> from keras_moe.models import ImageClassifier, MoETask
    >>> issubclass(ImageClassifier, MoETask)
    True
    >>> class Retrieval(keras_hub.models.Task, MoETask):
    ...     pass
    Traceback (most recent call last):
    ...
    TypeError: Expected class Retrieval(MoETask, keras_hub.models.Task); received: ...
    """

    task_name: str
    # Whether the task has weights besides its backbone's, saved in a separate file.
    has_head = True
    # Whether metrics compare outputs with labels.
    has_metrics = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        parents, task = cls.__mro__, keras_hub.models.Task
        if task not in parents or parents.index(task) < parents.index(MoETask):
            raise TypeError(
                f"Expected class {cls.__name__}(MoETask, keras_hub.models.Task); "
                f"received: bases={[base.__name__ for base in cls.__bases__]}"
            )

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        """The task's arguments, from its source and overrides.

        Args:
            source: preset or published weights.
            overrides: arguments of the task that replace the source's.
            backbone_config: arguments of the backbone, overrides included.
        """
        return TaskConfig({**source.task_config(), **overrides})

    @staticmethod
    def describe_parts(
        backbone_config: dict, num_tokens: int, dim: int, **config: Any
    ) -> list[Part]:
        """The parts that the task adds to its backbone, with their costs.

        Args:
            backbone_config: arguments of the backbone.
            num_tokens: number of the backbone's tokens.
            dim: size of a token.
            **config: arguments of the task.
        """
        return []

    def __init__(
        self, inputs: Any, outputs: Any, features: Any, routing: dict, **kwargs
    ):
        # One of KerasHub's own tasks would build its own head.
        with ONE_AT_A_TIME:
            keras_hub.models.Task.__init__(
                self, inputs=inputs, outputs=outputs, **kwargs
            )
        settle_policies(self)
        # Plain attributes: Keras would wrap the dicts of symbolic records.
        object.__setattr__(self, "_features", features)
        object.__setattr__(self, "_routing", routing)

    @property
    def features(self) -> Any:
        """The symbolic features that the outputs follow from."""
        return self._features

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name."""
        return self._routing

    def get_config(self):
        return keras_hub.models.Task.get_config(self)

    @classmethod
    def from_config(cls, config: dict) -> Any:
        """A task of `get_config`'s arguments."""
        config = dict(config)
        if isinstance(config.get("preprocessor"), dict):
            # KerasHub only takes layers.
            config["preprocessor"] = keras.saving.deserialize_keras_object(
                config["preprocessor"]
            )
        return super().from_config(config)

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = "auto",
        **kwargs,
    ) -> None:
        """Configures training, with defaults for this task.

        Args:
            optimizer: `"auto"` is AdamW at 3e-4 with weight decay 1e-4 and gradients
                clipped to global norm 1 (not with half-precision weights).
            loss: `"auto"` is `default_loss()`.
            metrics: `"auto"` is `default_metrics(loss)`.
            **kwargs: arguments of `keras.Model.compile`.
        """
        if isinstance(optimizer, str) and optimizer == "auto":
            optimizer = _default_optimizer(self.backbone.dtype_policy)
        if isinstance(loss, str) and loss == "auto":
            loss = self.default_loss()
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        if metrics is None and self.has_metrics:
            # With None Keras would keep the metrics of the compilation before.
            metrics = []
        keras_hub.models.Task.compile(
            self, optimizer=optimizer, loss=loss, metrics=metrics, **kwargs
        )

    def compile_from_config(self, config: dict) -> None:
        """Compiles a loaded model as it was saved.

        Keras does not compile a loaded model whose class overrides `compile`.
        """
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            # So that the optimizer's saved state finds its place.
            self.optimizer.build(self.trainable_variables)

    def default_loss(self) -> Any:
        """The loss of `compile(loss="auto")`: none besides the model's own."""
        return None

    def default_metrics(self, loss: Any) -> list:
        """The metrics of `compile(metrics="auto")` with this loss."""
        return []

    def check_labels(self, labels: Any) -> None:
        """Raises ValueError if labels do not fit the task; here all pass.

        They may be anything that `fit` takes, not just arrays.
        """

    def _check_inputs(self, inputs, labels=None):
        # A preprocessor of KerasHub takes other inputs, and makes the model's of them.
        if not self._has_keras_hub_preprocessor():
            check_inputs(self, inputs)
        if labels is not None:
            self.check_labels(labels)

    def _training_method(self, name: str) -> Callable:
        # KerasHub's `fit` turns all data into one kind of dataset, to map a
        # preprocessor over it: it knows no `PyDataset`, `DataLoader` or generator, and
        # does not shuffle arrays. Only its own preprocessors need it.
        owner = keras.Model
        if self._has_keras_hub_preprocessor():
            owner = keras_hub.models.Task
        return functools.partial(getattr(owner, name), self)

    def preprocess_samples(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Any:
        """Applies a preprocessor of KerasHub; without one the batch stays as it is."""
        if self._has_keras_hub_preprocessor():
            return keras_hub.models.Task.preprocess_samples(self, x, y, sample_weight)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def save_task_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the weights of the head, without the optimizer's state.

        KerasHub would store that, too: three times the size, and a warning on loading.
        """
        save_weights(self, filepath, objects_to_skip=_not_the_head(self))

    def load_task_weights(self, filepath: str | os.PathLike) -> None:
        """Loads the weights of the head."""
        skipped = _not_the_head(self)
        with checked_weights(filepath):
            keras.saving.load_weights(self, filepath, objects_to_skip=skipped)

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone except for low-rank pairs; the head stays trainable.

        Call it before the first `fit`, or compile again. See the backbone's method.
        """
        self.backbone.enable_lora(rank, target_layer_names)

    def _has_keras_hub_preprocessor(self):
        """Whether KerasHub prepares the inputs, which are not yet the model's."""
        return isinstance(self.preprocessor, keras_hub.models.Preprocessor)


def _not_the_head(task):
    skipped = flatten_layers(task.backbone)
    # There is none with compile=False.
    optimizer = getattr(task, "optimizer", None)
    return skipped if optimizer is None else [*skipped, optimizer]


def _default_optimizer(policy):
    # With bfloat16 weights beside float32 routers, TensorFlow cannot take the norm of
    # all gradients together.
    global_clipnorm = 1.0 if policy.variable_dtype == "float32" else None
    return keras.optimizers.AdamW(
        3e-4, weight_decay=1e-4, global_clipnorm=global_clipnorm
    )
