"""One call that checks what every layer of the library must do."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from keras import tree

from keras_moe._compat import flatten_layers
from keras_moe.routers import PathwayAwareRouter
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

# Arguments of a layer's base class that it refuses.
NOT_TAKEN = {"PathwayAwareRouter": PathwayAwareRouter.refused_arguments}
# Ends of the paths of weights that route.
FLOAT32 = ("router/kernel", "router/slots", "gate/kernel_0", "gate/kernel_1")
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")


def check_layer(
    make: Callable[..., keras.layers.Layer],
    inputs: np.ndarray,
    folder: Path,
    float32_weights: tuple[str, ...] = FLOAT32,
    no_gradient: tuple[str, ...] = (),
) -> None:
    """Checks all that layers do; arguments that `make` sets should be no defaults."""
    keras.utils.set_random_seed(1)
    check_config(make())
    check_shapes_and_saving(make, inputs, folder)
    for policy in POLICIES:
        check_policy(make, inputs, policy, float32_weights)
    check_gradients(make(), inputs, no_gradient)
    check_freezing(make, inputs)


def check_config(layer: keras.layers.Layer) -> None:
    """Every constructor argument is in the config, and the config makes it again."""
    config = layer.get_config()
    for cls in type(layer).__mro__:
        if cls is keras.layers.Layer:
            break
        if "__init__" not in vars(cls) or not cls.__module__.startswith("keras_moe"):
            continue
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name in NOT_TAKEN.get(type(layer).__name__, ()):
                continue
            if parameter.kind is not parameter.VAR_KEYWORD and name != "self":
                assert name in config, f"get_config of {cls.__name__} lacks {name}"
    config = json.loads(json.dumps(config))
    again = type(layer).from_config(config).get_config()
    assert json.loads(json.dumps(again)) == config
    assert keras.saving.get_registered_name(type(layer)).startswith("keras_moe>")


def check_shapes_and_saving(make, inputs, folder):
    """An unknown batch size; what is saved predicts the same; compiled is eager."""
    symbol = keras.Input(inputs.shape[1:])
    layer = make()
    symbolic = layer(symbol)
    model = keras.Model(symbol, symbolic)
    eager = layer(inputs)
    predicted = model.predict(inputs, batch_size=len(inputs) - 1, verbose=0)
    for spec, value, compiled in zip(
        tree.flatten(symbolic), tree.flatten(eager), tree.flatten(predicted)
    ):
        known = [a for a, b in zip(value.shape, spec.shape) if b is not None]
        assert known == [b for b in spec.shape if b is not None]
        assert keras.backend.standardize_dtype(value.dtype) == spec.dtype
        if spec.shape[0] is None:
            assert_close(value, compiled, 1e-4, 1e-5)
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path, safe_mode=True)
    again = loaded.predict(inputs, batch_size=len(inputs) - 1, verbose=0)
    assert_same(tree.flatten(predicted), tree.flatten(again))


def check_policy(make, inputs, policy, float32_weights):
    """The output has the compute dtype, weights the variable dtype, all finite."""
    dtype = keras.dtype_policies.get(policy)
    layer = make(dtype=policy)
    check_outputs(layer, inputs)
    for weight in layer.trainable_weights:
        wanted = dtype.variable_dtype
        is_kept = weight.path.endswith(float32_weights)
        if layer.dtype_policy.name == "float32" or is_kept:
            wanted = "float32"
        assert weight.dtype == wanted, weight.path
    # Layers given as arguments keep their own policy.
    outer = type(layer).from_config({**make().get_config(), "dtype": policy})
    if policies(outer) != policies(layer):
        check_outputs(outer, inputs)


def policies(layer):
    return [inner.dtype_policy.name for inner in flatten_layers(layer)]


def check_outputs(layer, inputs):
    """The first output has the layer's dtype, all the symbolic one, and are finite."""
    values = tree.flatten(layer(inputs.astype("float32")))
    specs = tree.flatten(layer(keras.Input(inputs.shape[1:])))
    # Routers are float32 under every policy.
    if layer.dtype_policy.name != "float32":
        dtype = keras.backend.standardize_dtype(values[0].dtype)
        assert dtype == layer.compute_dtype
    for spec, value in zip(specs, values):
        assert keras.backend.standardize_dtype(value.dtype) == spec.dtype
        value = keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))
        assert np.isfinite(value).all()


def check_gradients(layer, inputs, no_gradient):
    """Every trainable weight gets a finite gradient that is not zero."""
    layer.build(inputs.shape)
    if not layer.trainable_weights:
        return
    gradients = training_gradients(layer, inputs)
    assert len(gradients) == len(layer.trainable_weights)
    for weight, value in zip(layer.trainable_weights, gradients):
        assert np.isfinite(value).all(), weight.path
        if weight.name not in no_gradient:
            assert np.abs(value).max() > 0, weight.path


def check_freezing(make, inputs):
    """`trainable=False` freezes all, and a config has what is frozen of a layer."""
    symbol = keras.Input(inputs.shape[1:])
    layer = make(trainable=False)
    model = keras.Model(symbol, layer(symbol))
    assert (layer.trainable, model.trainable_variables) == (False, [])
    model = keras.Model(symbol, make()(symbol))
    layer, weights = model.layers[-1], model.trainable_variables
    inner = [x for x in flatten_layers(layer, include_self=False) if x.weights]
    # Every second part; then all but these; then one weight.
    for value in (False, True):
        layer.trainable = not value
        for part in inner[::2]:
            part.trainable = value
        assert_frozen_alike(model)
    layer.trainable = True
    for weight in weights[:1]:
        weight.trainable = False
        assert len(model.trainable_variables) == len(weights) - 1
    assert_frozen_alike(model)


def assert_frozen_alike(model):
    again = keras.Model.from_config(model.get_config())
    flags, other = (
        [(x.name, tuple(x.shape), x.trainable) for x in each.weights]
        for each in (model, again)
    )
    assert flags == other
    assert again.layers[-1].trainable == model.layers[-1].trainable
