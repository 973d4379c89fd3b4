"""Custom gradients and rematerialisation on TensorFlow that keep no graph alive.

`tf.custom_gradient`, and with it `keras.remat`, registers every gradient that it traces
under a new name, for ever, and with the gradient the whole graph.
"""

import tensorflow as tf
from tensorflow.python.eager import record

from keras_moe._compat import overridden_gradient


def custom_gradient(forward, backward, *inputs):
    """See `keras_moe.ops._primitives.custom_gradient`."""
    # A tape records no variables.
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    outputs, residuals = forward(*inputs)
    flat = tf.nest.flatten(outputs)
    count = len(flat)

    def gradient(*upstream):
        return backward(residuals, *upstream[:count])

    if tf.executing_eagerly():
        results = [tf.identity(x) for x in flat]
        record.record_operation("CustomGradient", results, inputs, gradient)
        return tf.nest.pack_sequence_as(outputs, results)

    def of_all(*upstream):
        return *[None] * count, *gradient(*upstream)

    # The operation holds its gradient, as those that call functions do, and goes with
    # its graph.
    through = [*flat, *inputs]
    graph = tf.compat.v1.get_default_graph()
    with overridden_gradient(graph, lambda _, *upstream: of_all(*upstream)):
        results = tf.identity_n(through)
    record.record_operation("CustomGradient", results, through, of_all)
    return tf.nest.pack_sequence_as(outputs, results[:count])


def remat(function, *inputs):
    """The tensors `function(*inputs)`, computed again for their gradient."""

    def forward(*inputs):
        with record.stop_recording():
            return function(*inputs), inputs

    def backward(inputs, *upstream):
        # XLA ignores control dependencies: what is computed again must depend on the
        # upstream gradient, or it would be found to be there already.
        first = tf.reshape(next(x for x in upstream if x is not None), [-1])[:1]
        wait = tf.cast(tf.reduce_max(first), "bool")
        wait = tf.where(tf.equal(wait, wait), 0.0, float("nan"))
        is_float = [x.dtype.is_floating for x in inputs]
        inputs = [
            x + tf.cast(wait, x.dtype) if floats else x
            for x, floats in zip(inputs, is_float)
        ]
        with tf.GradientTape() as tape:
            tape.watch([x for x, floats in zip(inputs, is_float) if floats])
            outputs = tf.nest.flatten(function(*inputs))
        return tape.gradient(outputs, inputs, upstream)

    return custom_gradient(forward, backward, *inputs)


def vjp(function, *inputs):
    """The value of a function, and a function from its gradient to the inputs'."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(*inputs)
    return outputs, lambda upstream: tape.gradient(outputs, inputs, upstream)
