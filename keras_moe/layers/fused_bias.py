"""Dense layers of Keras that add their bias while they multiply."""

import types

import keras

from keras_moe.ops.linear import linear


def fused_bias(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Makes a dense layer compute `keras_moe.ops.linear`, and returns it.

    The layer keeps its class, since Keras quantises no subclass of its dense layers:
    weights, paths, LoRA and quantised forms stay Keras's. XLA and TensorFlow's
    compiler fuse the two steps by themselves; there nothing changes.

    Args:
        layer: a `keras.layers.Dense`, or a `keras.layers.EinsumDense` of an attention
            layer, whose bias has all axes of the outputs that the kernel has.

    Example:

    >>> import keras
    >>> from keras_moe.layers.fused_bias import fused_bias
    >>> dense = fused_bias(keras.layers.Dense(2, bias_initializer="ones"))
    >>> float(keras.ops.sum(dense(keras.ops.zeros((1, 3)))))
    2.0
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
