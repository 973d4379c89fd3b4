"""The base class of layers: config, initial values and costs come from one place."""

import inspect
from typing import Any

import keras

from keras_moe.checks import argument_names
from keras_moe.layers import activations
from keras_moe.ops.cost import Cost, under
from keras_moe.ops.initializers import FastInitializer


class Layer(keras.layers.Layer):
    """Base class of layers whose attributes are named like constructor arguments."""

    def add_weight(self, *args, initializer, **kwargs):
        initializer = FastInitializer(initializer)
        return super().add_weight(*args, initializer=initializer, **kwargs)

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
        config = super().get_config()
        for cls in type(self).__mro__:
            if cls is Layer:
                break
            # Keras's own constructor would store dtype without its policy.
            if "__init__" not in vars(cls):
                continue
            for name in argument_names(cls):
                # A subclass may store an argument elsewhere, and add it to the config.
                if hasattr(self, name):
                    config[name] = _stored(getattr(self, name))
        return config


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
