"""Shared base of backbones and tasks: training, presets, weights and export."""

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import keras
import keras_hub

from keras_moe import _compat
from keras_moe._checks import unfit
from keras_moe._types import Config, KerasModel
from keras_moe.models import registry
from keras_moe.models.base import _input_checks
from keras_moe.models.base._copying import (
    config_with_router_arguments,
    copied,
    with_kept_experts,
)
from keras_moe.models.base._exporting import Exportable
from keras_moe.models.base.model_card import ModelCard, write_card
from keras_moe.models.loading.blueprint import Blueprint, Description, build
from keras_moe.models.saving import _weights_file
from keras_moe.models.saving._lora import TRAINING, apply_training
from keras_moe.models.saving._preset_folder import staged

# What a checker knows of the classes that ours extend.
if TYPE_CHECKING:

    class TorchParameters(KerasModel):
        pass

    class Backbone(KerasModel):
        pass

    class Task(KerasModel):
        backbone: Any
        preprocessor: Any

    class HubClassifier(Task):
        pass

    class HubCausalLM(Task):
        sampler: Any
        generate_function: Any

        def make_generate_function(self) -> Any: ...

else:
    Backbone = keras_hub.models.Backbone
    Task = keras_hub.models.Task
    HubCausalLM = keras_hub.models.CausalLM
    HubClassifier = keras_hub.models.ImageClassifier
    TorchParameters = _compat.TorchParameters

# Keras changes the bases of this shared class when it builds the first model, which
# would break another thread building one. KerasHub does so per task: those are built
# one at a time.
_compat.inject_functional_model_class(Backbone)


# Locks of models whose variables Keras takes away, on JAX.
_IN_USE = weakref.WeakKeyDictionary()


class ClassProperty:
    """A read-only property of a class."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __get__(self, _: object, owner: type) -> Any:
        return self.function(owner)


class MoEModel(Exportable, TorchParameters):
    """Methods shared by backbones and tasks."""

    # The config says what is frozen.
    keeps_own_freezing = True

    @classmethod
    def from_config(cls, config: Config) -> Self:
        arguments = {k: v for k, v in config.items() if k not in TRAINING}
        model = super().from_config(arguments)
        apply_training(model, config)
        return model

    def __setattr__(self, name, value):
        if name == "_jax_state":
            # It has only arrays: inspecting them at every step would be slow.
            object.__setattr__(self, name, value)
        elif name == "trainable":
            _compat.set_trainable(self, value)
        else:
            super().__setattr__(name, value)

    def _check_inputs(self, inputs, labels=None):
        _input_checks.check_inputs(self, inputs)

    def _run_through_graph(self, *args, **kwargs):
        # As `keras.models.clone_model` calls it.
        if {"operation_fn", "call_fn"} <= set(kwargs):
            raise ValueError(
                "Expected model.copy(), or type(model).from_config(model.get_config()) "
                "for new weights; received: keras.models.clone_model(model), which "
                f"would be a plain Functional without {type(self).__name__}'s methods"
            )
        return super()._run_through_graph(*args, **kwargs)

    def _training_method(self, name: str) -> Callable:
        return getattr(super(), name)

    def _training_data(self, x, y, sample_weight=None):
        """Returns the inputs and labels that Keras's methods get, checked."""
        self._check_inputs(x, y)
        if _input_checks.has_no_examples(x):
            # The mean over no examples is undefined.
            raise unfit("at least one image or example to train or evaluate on", "none")
        return x, y

    def fit(
        self, x: object = None, y: object = None, *args: object, **kwargs: object
    ) -> keras.callbacks.History:
        """Trains the model as `keras.Model.fit`; arrays are checked first."""
        x, y = self._training_data(x, y, kwargs.get("sample_weight"))
        validation = kwargs.get("validation_data")
        if isinstance(validation, (tuple, list)):
            inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(validation)
            inputs, labels = self._training_data(inputs, labels, weights)
            kwargs["validation_data"] = inputs, labels, weights
        with state_kept(self, training=True), _input_checks.one_call():
            return self._training_method("fit")(x, y, *args, **kwargs)

    def evaluate(
        self, x: object = None, y: object = None, *args: object, **kwargs: object
    ) -> Any:
        x, y = self._training_data(x, y, kwargs.get("sample_weight"))
        with state_kept(self), _input_checks.one_call():
            return self._training_method("evaluate")(x, y, *args, **kwargs)

    def predict(self, x: object, *args: object, **kwargs: object) -> Any:
        """Returns the outputs; see `keras.Model.predict`. Empty inputs are allowed."""
        _input_checks.check_prediction(self, x)
        if _input_checks.has_no_examples(x):
            return _input_checks.outputs_of_none(self)
        seen = ()
        if all(map(_input_checks.is_array, keras.tree.flatten(x))):
            # Looking at a batch of TensorFlow's on its way takes long, and ids and
            # shapes were checked above.
            _input_checks.warn_of_raw_pixels(self, x)
            seen = ("predict_function",)
        with _input_checks.one_call(seen):
            self.make_predict_function()
            return _compat.serving(self)._training_method("predict")(x, *args, **kwargs)

    # Look at the first batch.

    def make_train_function(self, force: bool = False) -> object:
        _compat.keep_no_steps(self.optimizer)
        _compat.build_optimizer(self)
        make = _compat.step_maker(self, "train_function", super().make_train_function)
        return _input_checks.make_step(self, "train_function", make, force)

    def make_test_function(self, force: bool = False) -> object:
        make = _compat.step_maker(self, "test_function", super().make_test_function)
        return _input_checks.make_step(self, "test_function", make, force)

    def make_predict_function(self, force: bool = False) -> object:
        make = super().make_predict_function
        make = _compat.step_maker(self, "predict_function", make)
        if keras.backend.backend() == "jax":
            make = functools.partial(_compat.make_pure_predict_function, self)
        return _input_checks.make_step(self, "predict_function", make, force)

    def train_on_batch(
        self, x: object, y: object = None, sample_weight: object = None, **kwargs
    ) -> Any:
        x, y = self._training_data(x, y, sample_weight)
        method = self._training_method("train_on_batch")
        with state_kept(self, training=True):
            return method(x, y, sample_weight, **kwargs)

    def test_on_batch(
        self, x: object, y: object = None, sample_weight: object = None, **kwargs
    ) -> Any:
        x, y = self._training_data(x, y, sample_weight)
        method = self._training_method("test_on_batch")
        with state_kept(self):
            return method(x, y, sample_weight, **kwargs)

    def predict_on_batch(self, x: object, *args: object, **kwargs: object) -> Any:
        _input_checks.check_prediction(self, x)
        if _input_checks.has_no_examples(x):
            return _input_checks.outputs_of_none(self)
        self.make_predict_function()
        own: Any = super(MoEModel, _compat.serving(self))
        return own.predict_on_batch(x, *args, **kwargs)

    @ClassProperty
    def presets(cls: Any):
        """The registered presets of this class, in KerasHub's format."""
        return registry.metadata_of(cls)

    @classmethod
    def from_preset(cls, preset: object, load_weights: bool = True, **kwargs) -> Self:
        """Creates a model from a preset; see `keras_moe.models.from_preset`."""
        return build(preset, kwargs, cls=cls, load_weights=load_weights)

    def save(
        self,
        filepath: object,
        overwrite: bool = True,
        zipped: object = None,
        **kwargs: object,
    ) -> None:
        """Atomically saves the whole model; see `keras.Model.save`."""
        registry.check_loadable(self)
        kwargs |= {"overwrite": overwrite, "zipped": zipped}
        save = functools.partial(super().save, **kwargs)
        _weights_file.save_model(self, save, filepath, overwrite)

    def save_assets(self, dir_path: str) -> None:
        # Whole models are saved by other ways, too, such as pickles and deep copies.
        registry.check_loadable(self)

    def save_to_preset(
        self,
        preset_dir: str | os.PathLike,
        max_shard_size: float | None = 10,
        card: ModelCard | None = None,
    ) -> None:
        """Atomically saves config, weights and model card to a preset folder.

        `metadata.json` records SHA-256 checksums, which loading verifies. `README.md`
        has the architecture, its costs and the fields of `card`.
        """
        registry.check_loadable(self)
        with staged(preset_dir) as folder, _weights_file.merged_adapters():
            super().save_to_preset(folder, max_shard_size=max_shard_size)
            # The backbone inside a task that is being saved gets no card.
            if folder != str(preset_dir):
                target = Path(preset_dir).expanduser().resolve()
                write_card(self, Path(folder), target, card)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Atomically saves all weights; see `keras.Model.save_weights`."""
        _weights_file.save_weights(self, filepath, overwrite, max_shard_size)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs
    ) -> None:
        with _weights_file.checked_weights(filepath):
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def copy(self) -> Self:
        """Returns a deep copy, compiled alike but with a fresh optimizer."""
        return copied(self, self.get_config())

    def describe(self) -> Description:
        """Returns the costs of the model; see `keras_moe.models.describe`."""
        return Blueprint.of_model(self).describe()

    def with_router_arguments(self, **arguments: object) -> Self:
        """Copy with the same weights, other router arguments and a fresh optimizer."""
        return copied(self, config_with_router_arguments(self, arguments))

    def with_kept_experts(
        self,
        kept_experts: dict[str, Any],
        method: str = "router_drop",
        removed: bool = True,
    ) -> Self:
        """Copy without some experts; see `keras_moe.analysis.prune_experts`."""
        return with_kept_experts(self, kept_experts, method, removed)


@contextlib.contextmanager
def state_kept(model: KerasModel, training: bool = False) -> Iterator[None]:
    """Restores the last complete step on errors; JAX would leave variables empty."""
    if keras.backend.backend() != "jax":
        yield
        return
    with _compat.ONE_AT_A_TIME:
        lock = _IN_USE.setdefault(model, threading.RLock())
    with lock:
        if training:
            # Its variables are needed here.
            _compat.build_optimizer(model)
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *model.metrics_variables]
        if optimizer is not None:
            variables += optimizer.variables
        # Holding references does not keep donated buffers alive.
        before = [(variable, _value(variable)) for variable in variables]
        try:
            yield
        except BaseException:
            # After the first step the model holds the previous step's state.
            model.jax_state_sync()
            for variable, value in before:
                if value is None or value.is_deleted() or _value(variable) is not None:
                    continue
                variable.assign(value)
            raise


def _value(variable):
    """Returns a variable's array, or None while Keras has taken it out."""
    try:
        return variable.value
    except TypeError:
        return None
