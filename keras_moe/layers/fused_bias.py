"""Dense layers of Keras that add their bias while they multiply."""

import types

import keras

from keras_moe.ops.nn import linear


def fused_bias(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Makes a dense layer compute `keras_moe.ops.linear`, and returns it.

    The layer keeps its class, since Keras quantises no subclass of its dense layers:
    weights, paths, LoRA and quantised forms stay Keras's. XLA and TensorFlow's
    compiler fuse the two steps by themselves; there nothing changes.
    """
    if keras.backend.backend() == "torch":
        layer.call = types.MethodType(_call, layer)
    return layer


def _call(layer, inputs, training=None):
    kernel, bias = layer.kernel, layer.bias
    if bias is None:
        return type(layer).call(layer, inputs, training=training)
    x = linear(inputs, kernel, bias, len(kernel.shape) - len(bias.shape))
    return x if layer.activation is None else layer.activation(x)
