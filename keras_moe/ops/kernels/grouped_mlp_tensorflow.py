"""Grouped MLP on TensorFlow: loops over tiles in graphs, which XLA compiles too."""

import tensorflow as tf

from keras_moe.ops.kernels import mlp_loops


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    if tf.executing_eagerly():
        return _eagerly(rows, group_sizes, weights, activation)
    return _in_graph(rows, group_sizes, weights, activation)


def _eagerly(rows, group_sizes, weights, activation):
    # XLA refuses a split into sizes that it does not know.
    rest = tf.shape(rows)[0] - tf.reduce_sum(group_sizes)
    *groups, rest = tf.split(rows, tf.concat([group_sizes, [rest]], axis=0))
    outputs = []
    stacked = [None if x is None else tf.unstack(x) for x in weights]
    for expert, x in enumerate(groups):
        own = mlp_loops.Weights(*(x and x[expert] for x in stacked))
        hidden = mlp_loops.activate(activation, *own.pre_activations(x))
        outputs.append(own.linear("output", hidden))
    return tf.concat([*outputs, tf.zeros_like(rest)], axis=0)


def _in_graph(rows, group_sizes, weights, activation):
    present = [x for x in weights if x is not None]

    def all_weights(present):
        present = iter(present)
        return mlp_loops.Weights(*(x if x is None else next(present) for x in weights))

    @tf.custom_gradient
    def grouped(rows, *present):
        outputs, kept = mlp_loops.forward(
            rows, group_sizes, all_weights(present), activation, keep=True
        )

        def gradient(upstream):
            dx, dw = mlp_loops.backward(
                rows, group_sizes, all_weights(present), activation, kept, upstream, vjp
            )
            return dx, *(x for x in dw if x is not None)

        return outputs, gradient

    return grouped(rows, *present)


def vjp(function, *inputs):
    """The value of a function, and a function from its gradient to the inputs'."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(*inputs)
    return outputs, lambda upstream: tape.gradient(outputs, inputs, upstream)
