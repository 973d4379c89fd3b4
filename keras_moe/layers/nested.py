"""Layers as arguments of layers."""

from typing import Any

import keras


def layer_argument(value: Any, name: str) -> keras.layers.Layer:
    """`value` as a layer."""
    if isinstance(value, dict):
        value = keras.saving.deserialize_keras_object(value)
    if not isinstance(value, keras.layers.Layer):
        raise ValueError(f"Expected {name} to be a layer; received: {name}={value!r}")
    return value


def build_once(layer: keras.layers.Layer, input_shape: tuple) -> None:
    """Builds a layer, unless its own saved config has built it already."""
    if not layer.built:
        layer.build(input_shape)
