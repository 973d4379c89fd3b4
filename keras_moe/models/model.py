"""The common base of backbones and tasks: training, presets, weights and export.

Axes: B batch.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_hub

from keras_moe.compat import (
    TorchParameters,
    inject_functional_model_class,
    is_state_of_steps,
)
from keras_moe.models import registry
from keras_moe.models.blueprint import Blueprint, build
from keras_moe.models.class_property import ClassProperty
from keras_moe.models.compilation import announcing, make_step
from keras_moe.models.copying import config_with_router_options, copied
from keras_moe.models.description import Description
from keras_moe.models.expert_pruning import with_kept_experts
from keras_moe.models.exporting import Exportable
from keras_moe.models.input_checks import (
    check_inputs,
    check_prediction,
    check_training,
    has_no_examples,
    outputs_of_none,
)
from keras_moe.models.model_card import ModelCard, write_card
from keras_moe.models.preset_folder import staged
from keras_moe.models.state_recovery import state_kept
from keras_moe.models.weights_file import checked_weights, save_weights

# Keras would change the bases of this class, which models share, when it builds the
# first model, and a thread that builds another one at that moment would fail. KerasHub
# changes them for each task: these are made one at a time.
inject_functional_model_class(keras_hub.models.Backbone)
ONE_AT_A_TIME = threading.RLock()


class MoEModel(Exportable, TorchParameters):
    """The methods that a backbone and a task have in common, ready for Keras.

    They check their arguments, and do what the model's Keras class does, which is the
    base behind this one: `MoEBackbone(MoEModel, keras_hub.models.Backbone)`. (This
    class is no Keras model itself: Keras cannot build a functional model whose class
    inherits from `keras.Model` along two paths.)

    Example:

    >>> import keras
    >>> from keras_moe.models.model import MoEModel
    >>> class Model(MoEModel, keras.Model):
    ...     pass
    >>> inputs = keras.Input((4,), name="inputs")
    >>> model = Model(inputs, keras.layers.Dense(2)(inputs))
    >>> model.predict(keras.ops.zeros((3, 5)))
    Traceback (most recent call last):
    ...
    ValueError: Expected inputs of shape (batch, 4); received: shape=(3, 5)
    """

    def __setattr__(self, name, value):
        if is_state_of_steps(name):
            # Arrays alone: a look into each of them costs time at every step.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _check_inputs(self, inputs, labels=None):
        check_inputs(self, inputs)

    def _training_method(self, name: str) -> Callable:
        """The Keras class's own method, such as `fit` or `train_on_batch`."""
        return getattr(super(), name)

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
        with state_kept(self, training=True), announcing("fit", (y, *args), kwargs):
            return self._training_method("fit")(x, y, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The loss and metrics; see `keras.Model.evaluate`, and `fit` for checks."""
        check_training(self, x, y)
        with state_kept(self), announcing("evaluate", (y, *args), kwargs):
            return self._training_method("evaluate")(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs; see `keras.Model.predict`. No images have empty outputs."""
        check_prediction(self, x)
        if has_no_examples(x):
            return outputs_of_none(self)
        with state_kept(self), announcing("predict", args, kwargs):
            return self._training_method("predict")(x, *args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Keras's own, whose first step is announced while it compiles."""
        return make_step(self, "train_function", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Keras's own, whose first step is announced while it compiles."""
        return make_step(self, "test_function", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Keras's own, whose first step is announced while it compiles."""
        return make_step(self, "predict_function", super().make_predict_function, force)

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of training; see `keras.Model.train_on_batch`, and `fit`."""
        check_training(self, x, y)
        with state_kept(self, training=True):
            return self._training_method("train_on_batch")(x, y, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss and metrics of a batch; see `keras.Model.test_on_batch`, and `fit`."""
        check_training(self, x, y)
        with state_kept(self):
            return self._training_method("test_on_batch")(x, y, *args, **kwargs)

    def predict_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch; see `keras.Model.predict_on_batch`."""
        check_prediction(self, x)
        if has_no_examples(x):
            return outputs_of_none(self)
        with state_kept(self):
            return super().predict_on_batch(x, *args, **kwargs)

    @ClassProperty
    def presets(cls):
        """The presets of this class that are known by name."""
        return registry.presets_of(cls)

    @classmethod
    def from_preset(cls, preset: Any, load_weights: bool = True, **kwargs) -> Any:
        """Makes a model from a preset.

        Args:
            preset: name of a preset (see `keras_moe.models.list_presets`), local
                folder, or `hf://`, `kaggle://` or `gs://` handle; or weights that
                others have published, see `keras_moe.models.convert`.
            load_weights: whether to load the preset's weights, if it has any.
            **kwargs: any argument of the backbone and, for a task, of the task. Weights
                must fit, except that position embeddings and the patch kernel are
                resized to another `image_shape` or `patch_size`. The dtype policy is
                the saved one.

        Returns:
            The model. With `num_classes` a classifier gets a new head.

        Raises:
            ValueError: if the preset is unknown (the nearest names are listed), is
                of another class, is not whole, or an argument is unknown.
        """
        return build(preset, kwargs, cls=cls, load_weights=load_weights)

    def save_to_preset(
        self,
        preset_dir: str | os.PathLike,
        max_shard_size: float | None = 10,
        card: ModelCard | None = None,
    ) -> None:
        """Saves config, weights and card to a preset folder, whole or not at all.

        The SHA-256 of the weights and of a tokenizer's files is in `metadata.json`, and
        loading compares it. The card is a `README.md` with the architecture, its costs
        and what `card` says.

        Args:
            preset_dir: a new folder, or one with an older preset, which is replaced
                only when all files of the new one are written.
            max_shard_size: largest size of one weights file in GB.
            card: texts and results of the card. Without one, a README.md that somebody
                wrote stays as it is.

        Raises:
            ValueError: if `preset_dir` holds something else than a preset.
            FolderInUse: an OSError that names the process that has been saving to
                `preset_dir` for ten minutes.
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. The older preset stays as it was.
        """
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)
            # The backbone of a task that is being saved has no card of its own.
            if folder != str(preset_dir):
                target = Path(preset_dir).expanduser().resolve()
                write_card(self, Path(folder), target, card)

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

    def copy(self) -> Any:
        """A new model with the same config, weights and settings of training.

        Its optimizer starts afresh.

        Raises:
            ValueError: if the model has weights that its config does not imply, such as
                low-rank pairs.
        """
        return copied(self, self.get_config())

    def describe(self) -> Description:
        """The costs of the model part by part, as `models.describe` has a preset's.

        Raises:
            ValueError: if its family is not registered.
        """
        return Blueprint.of_model(self).describe()

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

    def with_kept_experts(
        self,
        kept_experts: dict[str, Any],
        method: str = "router_drop",
        removed: bool = True,
    ) -> Any:
        """A new model whose MoE blocks keep some of their experts.

        Its optimizer starts afresh. See `keras_moe.analysis.prune_experts`.

        Args:
            kept_experts: numbers of the experts to keep by the block's name, such as
                `{"block_1": [0, 3]}`; the other blocks stay as they are.
            method: `"router_drop"`, `"router_pred"` or `"router_pred_skip"`.
            removed: whether the other experts are removed, or only serve nobody.

        Raises:
            ValueError: if there is no such block or expert, fewer than K are left, or
                the routers are not of token choice.
        """
        return with_kept_experts(self, kept_experts, method, removed)
