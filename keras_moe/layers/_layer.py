"""The base class of layers: config, initial values and costs come from one place."""

import inspect
from typing import Any

import keras

from keras_moe._checks import argument_values
from keras_moe._freezing import KeepsFrozen
from keras_moe.layers import activations
from keras_moe.ops._initializers import PathInitializer
from keras_moe.ops.cost import Cost, under


class OwnValues:
    """Mixin of Keras layers whose weights start by their paths."""

    def add_weight(self, shape=None, initializer=None, *args, **kwargs):
        if initializer is not None:
            path = f"{self.path}/{kwargs.get('name')}"
            initializer = PathInitializer(initializer, path)
        return super().add_weight(shape, initializer, *args, **kwargs)


class Layer(OwnValues, KeepsFrozen, keras.layers.Layer):
    """Base class of layers whose attributes are named like constructor arguments."""

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
        """The cost of an example of this shape."""
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


def layer_argument(value: Any, name: str) -> keras.layers.Layer:
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
