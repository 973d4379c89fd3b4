"""The common base of backbones and tasks: training, presets, weights and export."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
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
from keras_moe.models.compilation import announcing, make_step
from keras_moe.models.copying import (
    config_with_router_arguments,
    copied,
    with_kept_experts,
)
from keras_moe.models.description import Description
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
from keras_moe.models.source import Blueprint, build
from keras_moe.models.weights_file import checked_weights, save_weights

# Keras would change the bases of this class, which models share, when it builds the
# first model, and a thread that builds another one at that moment would fail. KerasHub
# changes them for each task: these are made one at a time.
inject_functional_model_class(keras_hub.models.Backbone)
ONE_AT_A_TIME = threading.RLock()


class ClassProperty:
    """A read-only property of a class."""

    def __init__(self, function: Callable[[type], Any]):
        self.function = function

    def __get__(self, _: Any, owner: type) -> Any:
        return self.function(owner)


class MoEModel(Exportable, TorchParameters):
    """The methods that a backbone and a task have in common, ready for Keras."""

    def __setattr__(self, name, value):
        if is_state_of_steps(name):
            # Only arrays: looking into each of them costs time at every step.
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

    # The first step is announced while it compiles.

    def make_train_function(self, force: bool = False) -> Any:
        return make_step(self, "train_function", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        return make_step(self, "test_function", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
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
        """Makes a model from a preset."""
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
        """
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)
            # The backbone of a task that is being saved has no separate card.
            if folder != str(preset_dir):
                target = Path(preset_dir).expanduser().resolve()
                write_card(self, Path(folder), target, card)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Saves all weights, see `keras.Model.save_weights`, whole or not at all."""
        save_weights(self, filepath, overwrite, max_shard_size)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads weights, see `keras.Model.load_weights`."""
        with checked_weights(filepath):
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def copy(self) -> Any:
        """A new model with the same config, weights and settings of training.

        Its optimizer starts afresh.
        """
        return copied(self, self.get_config())

    def describe(self) -> Description:
        """The costs of the model part by part, as `models.describe` has a preset's."""
        return Blueprint.of_model(self).describe()

    def with_router_arguments(self, **arguments: Any) -> Any:
        """A new model whose routers have other arguments, and the same weights.

        Its optimizer starts afresh.
        """
        return copied(self, config_with_router_arguments(self, arguments))

    def with_kept_experts(
        self,
        kept_experts: dict[str, Any],
        method: str = "router_drop",
        removed: bool = True,
    ) -> Any:
        """A new model whose MoE blocks keep some of their experts.

        Its optimizer starts afresh. See `keras_moe.analysis.prune_experts`.
        """
        return with_kept_experts(self, kept_experts, method, removed)


@contextlib.contextmanager
def state_kept(model: keras.Model, training: bool = False) -> Iterator[None]:
    """Restores a model's variables to the last complete step if the block raises.

    While Keras trains on JAX, the variables are empty, and an exception leaves them so:
    the next call would fail with "'NoneType' object is not callable". The other
    backends need nothing.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    optimizer = getattr(model, "optimizer", None)
    if training and optimizer is not None and not optimizer.built:
        # Keras would build it later, but its variables are needed here.
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.metrics_variables]
    if optimizer is not None:
        variables += optimizer.variables
    # References do not keep the memory of buffers that Keras donates.
    before = [(variable, _value(variable)) for variable in variables]
    try:
        yield
    except BaseException:
        # After the first step the model holds the state of the last one.
        model.jax_state_sync()
        for variable, value in before:
            if value is None or value.is_deleted() or _value(variable) is not None:
                continue
            variable.assign(value)
        raise


def _value(variable):
    """The variable's array, or None while Keras has taken it out."""
    try:
        return variable.value
    except TypeError:
        return None
