"""The base class of layers, cheap calls of inner layers, and rematerialisation.

Config, initial values and costs of a layer come from the constructor's arguments.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_moe import _compat
from keras_moe._checks import argument_values
from keras_moe._freezing import KeepsFrozen
from keras_moe._types import Initializer, Tensor
from keras_moe.layers import activations
from keras_moe.ops._initializers import PathInitializer
from keras_moe.ops._nn import linear
from keras_moe.ops._primitives import remat
from keras_moe.ops.cost import Cost, under


class OwnValues(keras.layers.Layer):
    """Mixin of Keras layers whose weights start by their paths."""

    def add_weight(self, shape=None, initializer=None, *args, **kwargs):
        if initializer is not None:
            path = f"{self.path}/{kwargs.get('name')}"
            initializer = PathInitializer(initializer, path)
        return super().add_weight(shape, initializer, *args, **kwargs)


class Layer(OwnValues, KeepsFrozen, keras.layers.Layer):
    """Base class of layers whose attributes are named like constructor arguments."""

    def compute_output_shape(self, input_shape):
        # Most layers keep the shape.
        return input_shape

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        """Inner layers, with the shapes of their inputs."""
        return {}

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        """Shapes of the trained weights by path, for an example of this shape."""
        shapes = {}
        for part, inputs in self.parts(shape).items():
            shapes.update(under(part.name, part.weight_shapes(inputs)))
        return shapes

    def cost(self, shape: tuple) -> Cost:
        parts = self.parts(shape).items()
        if not parts:
            return Cost.all_active(self.weight_shapes(shape))
        return sum((part.cost(inputs) for part, inputs in parts), Cost())

    def get_config(self):
        values = argument_values(self, Layer)
        stored = {name: _stored(value) for name, value in values.items()}
        return {**super().get_config(), **stored}


def _stored(value):
    """A constructor argument as it is stored in a config."""
    if inspect.isfunction(value):
        return activations.serialize(value)
    # Layers, initializers and activations with state.
    return keras.saving.serialize_keras_object(value) if callable(value) else value


def layer_argument(value: object, name: str) -> keras.layers.Layer:
    """Deserialises `value` if needed, and checks that it is a layer."""
    if isinstance(value, dict):
        value = keras.saving.deserialize_keras_object(value)
    if not isinstance(value, keras.layers.Layer):
        raise ValueError(f"Expected {name} to be a layer; received: {name}={value!r}")
    return value


def build_once(layer: keras.layers.Layer, input_shape: tuple) -> None:
    """Builds a layer, unless loading its saved config already has."""
    if not layer.built:
        layer.build(input_shape)


# `keras.layers.Layer.__call__` costs about 60 us, which on PyTorch is a tenth of the
# forward pass of a small model. `inner_call` and `fused_bias` can go once it is cheap.
def inner_call(
    layer: keras.layers.Layer, x: Any, *args: object, **kwargs: object
) -> Any:
    """`layer(x, ...)` without the bookkeeping already done by the outer call."""
    if keras.backend.backend() != "torch" or not _is_all(layer, x, kwargs):
        return layer(x, *args, **kwargs)
    if layer.autocast:
        x = _cast(layer, x)
        args = tuple(_cast(layer, value) for value in args)
        kwargs = {name: _cast(layer, value) for name, value in kwargs.items()}
    # Mixed precision reads variables in the layer's dtype.
    if (
        _compat.get_autocast_scope() is None
        and layer.compute_dtype == layer.variable_dtype
    ):
        return layer.call(x, *args, **kwargs)
    with _compat.AutocastScope(layer.compute_dtype if layer.autocast else None):
        return layer.call(x, *args, **kwargs)


def _is_all(layer, x, kwargs):
    """Whether calling the layer amounts to calling `layer.call`."""
    return (
        layer.built
        and ops.is_tensor(x)
        and _compat.get_keras_mask(x) is None
        and type(layer).__call__ is keras.layers.Layer.__call__
        and type(layer).forward is keras.layers.Layer.forward
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and _compat.passes_arguments(layer, kwargs)
        and keras.distribution.distribution() is None
        and not _compat.has_hooks(layer)
    )


def _cast(layer, value):
    if not ops.is_tensor(value):
        return value
    return layer.dtype_policy.convert_input(value, True, layer.compute_dtype)


def dropped_out(
    dropout: keras.layers.Dropout, x: Tensor, training: bool | None
) -> Tensor:
    """`dropout(x)`, skipping the call if the rate is 0."""
    if not dropout.rate:
        return x
    # `None` is resolved from the call context, which inner calls do not read.
    if training is None:
        return dropout(x)
    return inner_call(dropout, x, training=training)


def fused_bias(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Makes a dense layer compute `keras_moe.ops.linear` on PyTorch."""
    # Weight paths, LoRA and quantisation keep working.
    if keras.backend.backend() == "torch":
        layer.call = types.MethodType(_call, layer)
    return layer


def projection(
    owner: keras.layers.Layer,
    kind: Callable[..., keras.layers.Layer],
    name: str,
    *args: object,
    kernel: Initializer,
    bias: Initializer,
    **kwargs: object,
) -> Any:
    """Returns an unbuilt dense layer of `kind`, which starts by its path in `owner`."""
    path = f"{owner.path}/{name}"
    layer = kind(
        *args,
        kernel_initializer=PathInitializer(kernel, f"{path}/kernel"),
        bias_initializer=PathInitializer(bias, f"{path}/bias"),
        dtype=owner.dtype_policy,
        name=name,
        **kwargs,
    )
    return fused_bias(layer)


def _call(layer, inputs, training=None):
    kernel, bias = layer.kernel, layer.bias
    if bias is None:
        return type(layer).call(layer, inputs, training=training)
    x = linear(inputs, kernel, bias, len(kernel.shape) - len(bias.shape))
    return x if layer.activation is None else layer.activation(x)


# `keras.RematScope` recomputes a call as it is, so that losses and seeds leak out of
# the region (JAX) or are refused (TensorFlow). Here the region is a pure function:
# weights and seeds are arguments; losses and new seeds are results.
def rematerialized(
    layer: keras.layers.Layer, function: Callable[..., Any], *inputs: Tensor
) -> Any:
    """`function(*inputs)`, recomputing intermediate values for the gradient."""
    weights = [v for v in layer.variables if not _is_seed(v)]
    seeds = [v for v in layer.variables if _is_seed(v)]
    # Float variables that change without gradients: batch statistics.
    state = {
        id(v)
        for sublayer in _compat.flatten_layers(layer)
        for v in _compat.own_variables(sublayer, trainable=False)
        if "float" in v.dtype
    }
    # Uncast weights, since each sublayer casts them by its own policy.
    with _compat.AutocastScope(None):
        # Seeds and statistics are copied, because PyTorch changes them in place.
        values = [v.value * 1 if id(v) in state else v.value for v in weights]
        values += [v.value * 1 for v in seeds]
    structure: dict[str, Any] = {}
    num_inputs = len(inputs)

    def region(*arguments):
        inputs, values = arguments[:num_inputs], arguments[num_inputs:]
        with keras.StatelessScope(
            state_mapping=zip((*weights, *seeds), values), collect_losses=True
        ) as scope:
            outputs = function(*inputs)
            losses = list(scope.losses)
            # Sublayers remember losses by id, which later tensors may reuse.
            _compat.clear_losses(layer)
        # State that changes without gradients, such as batch statistics.
        structure["changed"] = [
            v
            for v, value in zip(weights, values)
            if id(v) in state and scope.get_current_value(v) is not value
        ]
        results = {
            "outputs": outputs,
            "state": [scope.get_current_value(v) for v in structure["changed"]],
            "losses": losses,
            # As floats, because not every backend can return integers. Only the second
            # half of a seed changes, which counts the draws.
            "draws": [
                ops.cast(scope.get_current_value(v)[1] - v0[1], "float32")  # pyright: ignore[reportOptionalSubscript]
                for v, v0 in zip(seeds, values[len(weights) :])
            ],
        }
        structure["results"] = tree.map_structure(lambda _: None, results)
        return tuple(tree.flatten(results))

    results = remat(region)(*inputs, *values)
    results = tree.pack_sequence_as(structure["results"], list(results))
    for seed, draws in zip(seeds, results["draws"]):
        moved = ops.stack([ops.zeros_like(draws), draws])
        seed.assign_add(ops.cast(moved, seed.dtype))
    for variable, value in zip(structure["changed"], results["state"]):
        variable.assign(ops.stop_gradient(value))
    for loss in results["losses"]:
        layer.add_loss(loss)
    return results["outputs"]


def _is_seed(variable):
    return "int" in variable.dtype and variable.path.endswith("seed_generator_state")
