"""Private parts of Keras and KerasHub, and why each is needed.

No other module imports from `keras.src` or `keras_hub.src`. Tested with Keras 3.15.1
and KerasHub 0.32.0, which is imported inside functions: the core needs only Keras.
"""
# ruff: noqa: F401

import collections
import contextlib
import functools
import inspect
import os
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np

# Variables that wait for their values are in a list of Keras's own.
from keras.src.backend.common import global_state

# Keras passes implicit masks only to calls with one tensor: layers with several inputs
# have to read them from the tensors.
from keras.src.backend.common.masking import get_keras_mask

# Only within it are variables without values read, for the shapes of outputs.
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

# Within a layer's call, only `AutocastScope(None)` gives variables in their own dtype,
# and no public function tells which scope is active.
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope

# Initializers that scale by fans compute them in their calls.
from keras.src.initializers.random_initializers import compute_fans

# Losses by a function of two tensors.
from keras.src.losses.losses import LossFunctionWrapper

# A model made of other layers, which only this method tells from a call.
from keras.src.models.functional import Functional

# Keras changes the bases of a class when the first model of it is built.
from keras.src.models.model import inject_functional_model_class

# The generator of whatever draws without a seed.
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR,
    draw_seed,
    global_seed_generator,
)

# Public stores copy the arrays they read, and cannot read into a buffer.
from keras.src.saving.saving_lib import H5IOStore, safe_get_h5_dataset

# `keras.saving.save_weights` asks like this before it replaces a file.
from keras.src.utils.io_utils import ask_to_proceed_with_overwrite

from keras_moe._checks import unfit
from keras_moe._types import Config, DType

# Layers.


def flatten_layers(
    layer: Any, include_self: bool = True, recursive: bool = True
) -> list[keras.layers.Layer]:
    """Returns a layer and all inner layers; `Model.layers` has only the outermost."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def own_variables(layer: keras.layers.Layer, trainable: bool) -> list[keras.Variable]:
    """Returns a layer's variables, unlike the public lists without inner layers'."""
    name = "_trainable_variables" if trainable else "_non_trainable_variables"
    return list(getattr(layer, name))


def order_layers(model: Any) -> None:
    """Puts a model's layers, and so its weights, in the order of its graph."""
    # Keras tracks them in the order in which attributes are set, except on PyTorch.
    places = {id(layer): place for place, layer in enumerate(model.layers)}
    # Layers outside of the graph are last.
    model._layers.sort(key=lambda layer: places.get(id(layer), len(places)))


def clear_losses(layer: keras.layers.Layer) -> None:
    """Clears all `add_loss` losses; Keras does so only before the outermost call."""
    layer._clear_losses()


@contextlib.contextmanager
def unlocked(layer: keras.layers.Layer) -> Iterator[None]:
    """Lets a built layer, which Keras locks, add weights such as LoRA adapters."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


def set_dtype_policy(layer: keras.layers.Layer, policy: DType) -> None:
    """Sets a built layer's policy; the public setter may also quantise the layer."""
    layer._dtype_policy = policy


def passes_arguments(layer: keras.layers.Layer, names: Iterable[str]) -> bool:
    """Whether Keras passes these arguments to `call`, outside of a `RematScope`."""
    takes = layer._call_has_training_arg or "training" not in names
    return takes and layer._remat_mode is None


def has_hooks(layer: keras.layers.Layer) -> bool:
    """Whether PyTorch hooks run around a layer's call."""
    from keras_moe._backends.torch import modules

    names = ("forward_pre", "forward", "backward_pre", "backward")
    return layer._compiled_call_impl is not None or any(
        getattr(layer, f"_{name}_hooks") or getattr(modules, f"_global_{name}_hooks")
        for name in names
    )


def mark_loss_as_built(model: Any) -> None:
    """Marks a model's loss as built, which a custom `compute_loss` never does."""
    # Until then, `train_on_batch` runs a symbolic step before each real one.
    model._compile_loss.built = True


def build_metrics(model: Any, batch: object) -> None:
    """Makes the variables of a compiled model's metrics, as before the first step."""
    model._symbolic_build(data_batch=batch)


def track_loss_by(model: Any, metric: keras.metrics.Metric) -> None:
    """Replaces the loss metric of a compiled model, a mean over batches."""
    # `setattr` would make Keras track the metric twice.
    object.__setattr__(model, "_loss_tracker", metric)


def has_seed_generator(layer: keras.layers.Layer) -> bool:
    """Whether a layer is one of Keras's random `DataLayer`s, which are not public."""
    return hasattr(layer, "_get_seed_generator")


@contextlib.contextmanager
def replaced_seed_generator(
    layer: keras.layers.Layer, generator: keras.random.SeedGenerator
) -> Iterator[None]:
    """Replaces the generator of a layer for `tf.data` within the context."""
    # In the instance's dict, where Keras does not track it.
    layer.__dict__["_get_seed_generator"] = lambda backend=None: generator
    try:
        yield
    finally:
        layer.__dict__.pop("_get_seed_generator", None)


# Views of models and layers, which answer in several threads at once.

# Keras makes step functions without a lock, and each would be compiled.
ONE_AT_A_TIME = threading.RLock()


def view(layer: keras.layers.Layer, **attributes: object) -> Any:
    """Returns a layer with the weights of another, and some attributes of its own."""
    other = object.__new__(type(layer))
    # In the instance's dict, where Keras and PyTorch track nothing.
    other.__dict__.update(vars(layer), **attributes)
    return other


def serving(model: Any) -> Any:
    """Returns what predicts like a model and leaves the model alone meanwhile."""
    # On JAX, Keras's `predict` takes the values out of a model's variables while it
    # runs, and donates them: any other thread that uses these variables fails.
    if keras.backend.backend() != "jax" or "jax_state_sync" in vars(model):
        return model
    with ONE_AT_A_TIME:
        make_pure_predict_function(model)

    def state(purge_model_variables=False, **which):
        return model._get_jax_state(**which)

    return view(model, _get_jax_state=state, jax_state_sync=lambda: None)


def make_pure_predict_function(model: Any, force: bool = False) -> None:
    """`make_predict_function` on JAX, without donation, compiled once per shape."""
    from keras.src.backend.jax.trainer import jit

    # JAX tells states apart by their shapes only: freezing other variables needs a step
    # of its own, or it would mistake one for another.
    order = [
        *map(id, model.trainable_variables),
        *map(id, model.non_trainable_variables),
    ]
    made: Any = model.predict_function
    if not force and made and getattr(inspect.unwrap(made), "order", None) == order:
        return

    def step(data, state):
        outputs, after = model.predict_step(state, data)
        # Such as seeds that a layer draws from; the rest of the state stays.
        pairs = enumerate(zip(state[1], after))
        return outputs, {i: new for i, (old, new) in pairs if new is not old}

    if model.jit_compile and not model.run_eagerly:
        step = compiled_once(jit(step))

    def run(state, data):
        outputs, changed = step(data, state)
        values = list(state[1])
        for index, value in changed.items():
            model.non_trainable_variables[index].assign(value)
            values[index] = value
        return outputs, (state[0], values)

    run = model._make_function(run, concatenate_outputs=True)
    run.order = order
    model.predict_function = run  # pyright: ignore[reportAttributeAccessIssue]


def compiled_once(function: Callable) -> Callable:
    """Lets one thread compile a function for each new shape of its first argument."""
    known, lock = set(), threading.RLock()

    @functools.wraps(function)
    def run(data, *args, **kwargs):
        leaves = keras.tree.flatten((data, kwargs))
        key = str([getattr(x, "shape", x) for x in leaves])
        if key in known:
            return function(data, *args, **kwargs)
        with lock:
            outputs = function(data, *args, **kwargs)
            known.add(key)
        return outputs

    return run


def step_maker(model: Any, name: str, make: Callable) -> Callable:
    """Keras's `make`, or on PyTorch what makes a step compiled as one graph."""
    if keras.backend.backend() != "torch" or not model.jit_compile:
        return make
    optimizer = model.optimizer if name == "train_function" else None
    by_values = ("gradient_accumulation_steps", "ema_overwrite_frequency")
    read = [x for x in by_values if getattr(optimizer, x, None)]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        read.append("a loss scale")
    if read:
        return functools.partial(make_eager_step, model, make, read[0])
    from keras_moe._backends.torch_graphs import make_step

    def step(data, rates):
        trains = name == "train_function"
        with at_rates(model.optimizer, rates) if trains else contextlib.nullcontext():
            return getattr(model, name.replace("function", "step"))(data)

    return functools.partial(make_step, model, name, step, scheduled_rates, recording)


def compiled(model: Any, function: Callable) -> Callable:
    """A function of tensors that calls a model, on PyTorch as one graph if compiled."""
    if keras.backend.backend() != "torch" or not model.jit_compile:
        return function
    from keras_moe._backends.torch_graphs import compiled

    return compiled(model, function, recording)


def make_eager_step(
    model: keras.Model, make: Callable, reads: str, force: bool = False
) -> object:
    """Keras's step, uncompiled: its optimizer decides by values what a step does."""
    warnings.warn(
        f"The optimizer has {reads}, so a step is no one graph: it runs uncompiled, as "
        "with jit_compile=False.",
        stacklevel=2,
    )
    kept, model.jit_compile = model.jit_compile, False
    try:
        return make(force)
    finally:
        model.jit_compile = kept


def scheduled_rates(model: keras.Model) -> list:
    """The learning rate that a schedule or function gives now, if there is one."""
    rate = rate_or_schedule(model.optimizer)
    if isinstance(rate, keras.Variable):
        return []
    return [keras.ops.convert_to_tensor(model.optimizer._get_current_learning_rate())]


@contextlib.contextmanager
def at_rates(optimizer: keras.optimizers.Optimizer, rates: list) -> Iterator[None]:
    """The optimizer has these `scheduled_rates`, and reads the value of none."""
    from keras.src.backend.torch.optimizers import torch_parallel_optimizer

    Parallel: Any = torch_parallel_optimizer.TorchParallelOptimizer
    kinds, kept = keras.optimizers, optimizer._learning_rate
    update = Parallel._backend_update_step
    try:
        if rates:
            optimizer._learning_rate = lambda: rates[0]
        if isinstance(optimizer, (kinds.SGD, kinds.Adadelta, kinds.Nadam)):
            # Their forms for PyTorch take numbers; those of all backends do not.
            Parallel._backend_update_step = lambda own, *args: super(
                Parallel, own
            )._backend_update_step(*args)
        yield
    finally:
        Parallel._backend_update_step = update
        if rates:
            optimizer._learning_rate = kept


# Optimizers and variables.


def set_trainable(layer: Any, value: object) -> None:
    """Freezes a layer with all its parts, or thaws them.

    On TensorFlow, Keras ignores `layer.trainable = True` where that is what it was, and
    leaves parts frozen that were frozen by themselves.
    """
    for part in layer._flatten_layers():
        type(part).trainable.__set__(part, value)


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables: within a step, TensorFlow traces it twice."""
    # A model that is not compiled has none.
    optimizer = getattr(model, "optimizer", None)
    trained = model.trainable_variables
    if optimizer is None or optimizer.built or not trained:
        return
    on_tensorflow = keras.backend.backend() == "tensorflow"
    scope = model.distribute_strategy.scope if on_tensorflow else contextlib.nullcontext
    with scope():
        optimizer.build(trained)


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the averages of the weights; the public method overwrites the weights."""
    return list(optimizer._model_variables_moving_average)


def count_batches(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the count of batches; `iterations` counts updates of accumulated ones."""
    return optimizer._iterations


def keep_no_steps(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets an optimizer on TensorFlow sum gradients only over several replicas."""
    # TensorFlow's sum registers a gradient of its own for ever, and so the traced step.
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        strategy = getattr(part, "_distribution_strategy", None)
        if strategy is not None and strategy.num_replicas_in_sync == 1:
            part.__dict__["_all_reduce_sum_gradients"] = list


def overridden_gradient(graph: Any, function: Callable) -> Any:
    """Context in which an `IdentityN` of TensorFlow holds its gradient, a function."""
    return graph._override_gradient_function({"IdentityN": function})


def functions_are_transformed(torch: ModuleType) -> bool:
    """Whether `torch.func` takes gradients or vectorises what is called now."""
    return torch._C._are_functorch_transforms_active()


def rate_or_schedule(
    optimizer: keras.optimizers.Optimizer,
) -> keras.Variable | keras.optimizers.schedules.LearningRateSchedule:
    """Returns an optimizer's learning rate or schedule; the public one is a number."""
    return optimizer._learning_rate


@contextlib.contextmanager
def restored(variables: list) -> Iterator[list[np.ndarray]]:
    """Lets variables change within the context and restores them on exit."""
    kept = [np.array(keras.ops.convert_to_numpy(v.value)) for v in variables]
    try:
        yield kept
    finally:
        for variable, value in zip(variables, kept):
            variable.assign(value)


def random_states() -> Config:
    """Returns the states of all generators but those in models, as JSON data."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "keras": generator and keras.ops.convert_to_numpy(generator.state).tolist(),
    }
    if keras.backend.backend() == "torch":
        from keras_moe._backends.torch import generator_states

        states["torch"] = generator_states()
    return states


def set_random_states(states: Config) -> None:
    """Sets what `random_states` returned, here or in an earlier process."""
    if states["keras"] is None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    else:
        global_seed_generator().state.assign(states["keras"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))
    set_backend_states(states)


def set_backend_states(states: Config) -> None:
    """Sets the states of the backend's generators; only PyTorch has any."""
    # A checkpoint of another backend has none.
    if keras.backend.backend() == "torch" and "torch" in states:
        from keras_moe._backends.torch import set_generator_states

        set_generator_states(states["torch"])


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores all random states on exit, but those in models."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def recording(model: Any, torch: object) -> Iterator[None]:
    """Keras draws by a `torch` that takes seeds for generators, which no graph has."""
    from keras.src.backend.torch import random

    numbers: Any = random
    # What is replaced is replaced for all threads.
    with ONE_AT_A_TIME:
        kept = numbers.torch, numbers.torch_seed_generator
        numbers.torch, numbers.torch_seed_generator = torch, draw_seed
        try:
            yield
        finally:
            numbers.torch, numbers.torch_seed_generator = kept
            # Layers remember losses by id, which later tensors may reuse.
            clear_losses(model)


@contextlib.contextmanager
def variables_without_values() -> Iterator[None]:
    """Variables made within the context have shapes and dtypes, and never values."""
    waiting: Any = global_state.get_global_attribute(
        "uninitialized_variables", [], set_to_default=True
    )
    before = len(waiting)
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        for variable in waiting[before:]:
            variable._initializer = functools.partial(_placeholder, variable.path)
        # Keras would initialise them after the next such scope.
        del waiting[before:]


def _placeholder(path, shape, dtype=None):
    """What reading a variable without a value gives, where only shapes matter."""
    if not in_symbolic_scope():
        expected = "a model with weights"
        raise unfit(expected, f"one of `models.abstract`, whose {path} has no value")
    return keras.ops.zeros(shape, dtype)


def take_layout(variable: keras.Variable) -> None:
    """Gives a variable without a value its layout in the current distribution."""
    variable._initialize_layout()


def variable_layout(variable: keras.Variable) -> Any:
    """Returns a variable's layout on devices, or None; there is no public attribute."""
    return getattr(variable, "_layout", None)


# Presets. KerasHub reads folders and handles (`hf://`, `kaggle://`) only entirely.


def hub_file(preset: str, name: str) -> str:
    """Returns the path of a file behind a handle or KerasHub's name of a preset."""
    from keras_hub.src.utils import preset_utils

    return preset_utils.get_file(preset, name)


def init_task(task: Any, compile: bool = True, **kwargs: object) -> None:
    """`keras_hub.models.Task.__init__` while other threads use other tasks."""
    # KerasHub's takes `Functional` out of the bases of all tasks for a moment.
    # `keras.Model.__init__` puts `Functional` there, for the first model of a class.
    base = Functional if isinstance(task, Functional) else keras.Model
    base.__init__(task, **kwargs)
    task._functional_layer_ids = set(map(id, task._flatten_layers()))
    task._initialized = True
    task.dtype_policy = task.backbone.dtype_policy
    if compile:
        task.compile()


def is_cached_of_storage(preset: str, name: str) -> bool:
    """Whether KerasHub has downloaded a file of a `gs://` preset before."""
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    folder = re.sub("://|-|/", "_", preset)
    return os.path.exists(os.path.join(home, "models", folder, name))


def stored_dataset(store: object, key: str) -> Any:
    """Returns the HDF5 dataset of a stored array, unread; `store[key]` copies it."""
    group: Any = getattr(store, "_h5_entry_group", None)
    if not isinstance(store, H5IOStore) or key not in group:
        return None
    # Rejects links and values in other files.
    dataset = safe_get_h5_dataset(group, key)
    return None if "dtype" in dataset.attrs else dataset


# PyTorch's modules.

_GENERATOR = re.compile(r"(.*/)?seed_generator(?:_\d+)?/(\w+)")


class _NoParameters:
    """Base class on other backends, where models are not modules."""


class _TorchParameters:
    """Completes `parameters()` and `state_dict()` of a KerasHub model.

    Within `torch.compile`, its call is one graph.
    """

    variables: list[keras.Variable]
    _modules: dict
    _torch_params: Any
    _region: Any

    def __new__(cls, *args: object, **kwargs: object):
        from keras_moe._backends.torch_graphs import Region

        made = super().__new__(cls, *args, **kwargs)
        call = super(_TorchParameters, made).__call__  # pyright: ignore[reportAttributeAccessIssue]
        made.__dict__.update(_region=Region(made, call, recording), _graph_losses=None)
        return made

    def __call__(self, *args: object, **kwargs: object) -> Any:
        from keras_moe._backends.torch_graphs import is_reading

        losses = None
        if is_reading():
            values = [v._value for v in self._region.variables()]
            # Dynamo takes no None here, which is what these arguments are without it.
            kwargs = {name: x for name, x in kwargs.items() if x is not None}
            outputs, losses = self._region.run(values, args, kwargs)
        else:
            outputs = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        object.__setattr__(self, "_graph_losses", losses)
        return outputs

    @property
    def losses(self) -> list:
        """See `keras.layers.Layer.losses`; a compiled call returns its own."""
        losses = self.__dict__["_graph_losses"]
        return super().losses if losses is None else losses  # pyright: ignore[reportAttributeAccessIssue]

    def _track_variables(self):
        super()._track_variables()  # pyright: ignore[reportAttributeAccessIssue]
        variables, numbers = list(self.variables), collections.Counter()
        parameters = {}
        for variable in variables:
            name = variable.path
            if generator := _GENERATOR.fullmatch(name):
                layer, state = generator.groups("")
                name = f"{layer}seed_generator_{numbers[layer]}/{state}"
                numbers[layer] += 1
            parameters[name] = variable.value
        self._torch_params = type(self._torch_params)(parameters)
        object.__setattr__(self, "_tracked_variables", variables)

    def _track_all(self):
        tracked = self.__dict__.get("_tracked_variables", ())
        variables = self.variables
        is_complete = "_torch_params" in self._modules and len(tracked) == len(
            variables
        )
        if not is_complete or any(a is not b for a, b in zip(tracked, variables)):
            self._track_variables()

    def named_parameters(self, *args: object, **kwargs: object):
        """See `torch.nn.Module.named_parameters`."""
        self._track_all()
        return super().named_parameters(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self, *args: object, **kwargs: object) -> dict:
        """See `torch.nn.Module.state_dict`."""
        self._track_all()
        return super().state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def load_state_dict(self, *args: object, **kwargs: object):
        """See `torch.nn.Module.load_state_dict`."""
        self._track_all()
        return super().load_state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, *args: object, **kwargs: object):
        # PyTorch calls it for `to`, `cuda`, `double` and so on.
        self._track_all()
        return super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


TorchParameters = (
    _TorchParameters if keras.backend.backend() == "torch" else _NoParameters
)
