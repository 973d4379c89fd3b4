"""The base of all tasks: a backbone, the layers on top of it, and their training.

Axes: B batch.
"""

import os
from typing import Any

import keras
import keras_hub

from keras_moe.compat import TorchParameters
from keras_moe.models import registry, task_weights
from keras_moe.models.blueprint import build
from keras_moe.models.class_property import ClassProperty
from keras_moe.models.compile_defaults import default_optimizer
from keras_moe.models.copying import config_with_router_options, copied
from keras_moe.models.description import Part
from keras_moe.models.exporting import export_signature
from keras_moe.models.input_checks import (
    check_inputs,
    check_prediction,
    check_training,
    has_no_examples,
    outputs_of_none,
)
from keras_moe.models.model_sources import ModelSource, TaskConfig
from keras_moe.models.preset_folder import staged
from keras_moe.models.quantization import settle_policies
from keras_moe.models.state_recovery import state_kept
from keras_moe.models.trainer import (
    has_keras_hub_preprocessor,
    preprocessed_batch,
    training_method,
)
from keras_moe.models.weights_file import checked_weights, save_weights


class MoETask(TorchParameters):
    """A backbone with what a task adds to it, ready for `fit`.

    This is the base of `ImageClassifier`, and of one's own tasks. The second base of a
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

    Raises:
        TypeError: if a subclass is defined with the bases in another order.

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
        # One of KerasHub's own tasks would build a head of its own.
        keras_hub.models.Task.__init__(self, inputs=inputs, outputs=outputs, **kwargs)
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
        """A task of `get_config`'s arguments.

        Args:
            config: result of `get_config`.
        """
        config = dict(config)
        if isinstance(config.get("preprocessor"), dict):
            # KerasHub takes layers alone.
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
            optimizer = default_optimizer(self.backbone.dtype_policy)
        if isinstance(loss, str) and loss == "auto":
            loss = self.default_loss()
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        if metrics is None:
            # With None Keras would keep the metrics of the compilation before.
            metrics = []
        keras_hub.models.Task.compile(
            self, optimizer=optimizer, loss=loss, metrics=metrics, **kwargs
        )

    def compile_from_config(self, config: dict) -> None:
        """Compiles a loaded model as it was saved.

        Keras does not compile a loaded model whose class has a `compile` of its own.

        Args:
            config: result of `get_compile_config`.
        """
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            # So that the optimizer's saved state finds its place.
            self.optimizer.build(self.trainable_variables)

    def default_loss(self) -> Any:
        """The loss of `compile(loss="auto")`: none beside the model's own."""
        return None

    def default_metrics(self, loss: Any) -> list:
        """The metrics of `compile(metrics="auto")`.

        Args:
            loss: loss that the model is trained with.
        """
        return []

    def check_labels(self, labels: Any) -> None:
        """Raises ValueError if labels do not fit the task; here all pass.

        Args:
            labels: labels of `fit` or `evaluate`, which may be no arrays.
        """

    def _check_inputs(self, inputs, labels=None):
        # A preprocessor of KerasHub takes other inputs, and makes the model's of them.
        if not has_keras_hub_preprocessor(self):
            check_inputs(self, inputs)
        if labels is not None:
            self.check_labels(labels)

    def fit(
        self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any
    ) -> keras.callbacks.History:
        """Trains the model.

        Arrays, those of `validation_data` too, are checked first: another shape or
        labels out of range raise ValueError. Datasets and generators are not read
        ahead of time.

        Args:
            x: inputs as arrays, or a `tf.data.Dataset`, a `keras.utils.PyDataset`, a
                PyTorch `DataLoader`, a Grain dataset or loader, or a generator of
                batches; see `keras.Model.fit`.
            y: labels, where `x` is arrays.
            *args: arguments of `keras.Model.fit`.
            **kwargs: arguments of `keras.Model.fit`.
        """
        check_training(self, x, y, kwargs.get("validation_data"))
        with state_kept(self, training=True):
            return training_method(self, "fit")(x, y, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The loss and metrics; see `keras.Model.evaluate`, and `fit` for checks."""
        check_training(self, x, y)
        with state_kept(self):
            return training_method(self, "evaluate")(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs; see `keras.Model.predict`. No images have empty outputs."""
        check_prediction(self, x)
        if has_no_examples(x):
            return outputs_of_none(self)
        with state_kept(self):
            return training_method(self, "predict")(x, *args, **kwargs)

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of training; see `keras.Model.train_on_batch`, and `fit`."""
        check_training(self, x, y)
        with state_kept(self, training=True):
            return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss and metrics of a batch; see `keras.Model.test_on_batch`, and `fit`."""
        check_training(self, x, y)
        with state_kept(self):
            return super().test_on_batch(x, y, *args, **kwargs)

    def predict_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch; see `keras.Model.predict_on_batch`."""
        check_prediction(self, x)
        if has_no_examples(x):
            return outputs_of_none(self)
        with state_kept(self):
            return super().predict_on_batch(x, *args, **kwargs)

    def preprocess_samples(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Any:
        """A batch for the model: as it is, without a preprocessor of KerasHub."""
        return preprocessed_batch(self, x, y, sample_weight)

    @ClassProperty
    def presets(cls):
        """The presets of this class that are known by name."""
        return registry.presets_of(cls)

    @classmethod
    def from_preset(cls, preset: Any, load_weights: bool = True, **kwargs) -> Any:
        """Makes a model from a preset.

        Args:
            preset: name of a preset (an architecture without weights), local folder,
                or `hf://`, `kaggle://` or `gs://` handle; or weights that others have
                published, see `keras_moe.models.convert`.
            load_weights: whether to load the preset's weights, if it has any.
            **kwargs: any argument of the backbone or the task. Weights must fit,
                except that position embeddings and the patch kernel are resized to
                another `image_shape` or `patch_size`. The dtype policy is the saved
                one.

        Returns:
            The model. With `num_classes` a task gets a new head.

        Raises:
            ValueError: if the preset is unknown (the nearest names are listed), is
                of another class, is not whole, or an argument is unknown.
        """
        return build(preset, kwargs, cls=cls, load_weights=load_weights)

    def save_to_preset(
        self, preset_dir: str | os.PathLike, max_shard_size: float | None = 10
    ) -> None:
        """Saves config and weights to a preset folder, whole or not at all.

        The SHA-256 of the weights is in `metadata.json`, and loading compares it.

        Args:
            preset_dir: a new folder, or one with an older preset, which is replaced
                only when all files of the new one are written.
            max_shard_size: largest size of one weights file in GB.

        Raises:
            ValueError: if `preset_dir` holds something else than a preset.
            FolderInUse: an OSError that names the process that has been saving to
                `preset_dir` for ten minutes.
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. The older preset stays as it was.
        """
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Saves all weights, see `keras.Model.save_weights`, whole or not at all.

        Args:
            filepath: name that ends with `.weights.h5`, or for shards `.weights.json`.
            overwrite: whether to replace a file without asking.
            max_shard_size: largest size of one file in GB.

        Raises:
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. Those that were there stay as they were.
        """
        save_weights(self, filepath, overwrite, max_shard_size)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads weights, see `keras.Model.load_weights`.

        Args:
            filepath: path of a file that `save_weights` has written, or of a preset's,
                which is compared with the checksum in its `metadata.json`.
            skip_mismatch: whether to leave out weights that do not fit.
            **kwargs: arguments of `keras.Model.load_weights`.

        Raises:
            ValueError: naming the file, if it is damaged, or does not fit.
        """
        with checked_weights(filepath):
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def save_task_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the weights of the head alone."""
        task_weights.save_task_weights(self, filepath)

    def load_task_weights(self, filepath: str | os.PathLike) -> None:
        """Loads the weights of the head alone."""
        task_weights.load_task_weights(self, filepath)

    def copy(self) -> Any:
        """A new model with the same config, weights and settings of training.

        Its optimizer starts afresh.

        Raises:
            ValueError: if the model has weights that its config does not imply, such as
                low-rank pairs.
        """
        return copied(self, self.get_config())

    def with_router_options(self, **options: Any) -> Any:
        """A new model whose routers have other options, and the same weights.

        Its optimizer starts afresh.

        Args:
            **options: arguments of the router's class, beside or instead of those in
                `router_options`.

        Raises:
            ValueError: as `copy`, or if the routers do not take an option, or have
                other weights with it.
        """
        return copied(self, config_with_router_options(self, options))

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone but for low-rank pairs; the head stays trainable.

        Call it before the first `fit`, or compile again.

        Args:
            rank: rank of the pairs.
            target_layer_names: argument of the backbone's `enable_lora`.
        """
        self.backbone.enable_lora(rank, target_layer_names)

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs,
    ) -> None:
        """Exports the model in its inference form.

        Args:
            filepath: path of the file or folder to write.
            format: `"tf_saved_model"` (JAX and TensorFlow), which serves any batch (on
                JAX of one size where groups are larger than an image);
                `"torch"` (PyTorch), for one image, or with `dynamic_shapes={0:
                torch.export.Dim("batch", max=256)}` for any number where each image
                is routed by itself: dense models, soft routing and token choice; or
                `"onnx"`, on PyTorch for dense models and soft routing.
            verbose: whether to print a message.
            input_signature: `[keras.InputSpec((batch, height, width, channels))]`, for
                another number of images than one.
            **kwargs: arguments of `keras.Model.export`.

        Raises:
            ValueError: if the format cannot hold the model.
        """
        shapes = kwargs.get("dynamic_shapes")
        signature = export_signature(self, format, input_signature, shapes)
        super().export(
            filepath,
            format=format,
            verbose=verbose,
            input_signature=signature,
            **kwargs,
        )
