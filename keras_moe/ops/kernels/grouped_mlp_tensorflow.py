"""Grouped MLP on TensorFlow: block loops for XLA, else expert after expert."""

import tensorflow as tf

from keras_moe.ops.kernels import mlp_loops, tracing_tensorflow


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    # XLA refuses a split into sizes that it does not know; elsewhere loops would copy
    # their outputs in every step.
    if tracing_tensorflow.for_xla():
        return with_loops(rows, group_sizes, weights, activation)
    return expert_by_expert(rows, group_sizes, weights, activation)


def expert_by_expert(rows, group_sizes, weights, activation):
    rest = tf.shape(rows)[0] - tf.reduce_sum(group_sizes)
    *groups, rest = tf.split(rows, tf.concat([group_sizes, [rest]], axis=0))
    outputs = []
    stacked = [None if x is None else tf.unstack(x) for x in weights]
    for expert, x in enumerate(groups):
        own = mlp_loops.Weights(*(x and x[expert] for x in stacked))
        hidden = mlp_loops.activate(activation, *own.pre_activations(x))
        outputs.append(own.linear("output", hidden))
    return tf.concat([*outputs, tf.zeros_like(rest)], axis=0)


def with_loops(rows, group_sizes, weights, activation):
    present = [x for x in weights if x is not None]

    def all_weights(present):
        present = iter(present)
        return mlp_loops.Weights(*(x if x is None else next(present) for x in weights))

    def run(rows, present, keep):
        weights = all_weights(present)
        return mlp_loops.forward(rows, group_sizes, weights, activation, keep)

    @tf.custom_gradient
    def grouped(rows, *present):
        # An (R, H) array is not written where nobody reads it.
        outputs, kept = run(rows, present, tracing_tensorflow.for_gradients())

        def gradient(upstream):
            needed = kept or run(rows, present, True)[1]
            dx, dw = mlp_loops.backward(
                rows,
                group_sizes,
                all_weights(present),
                activation,
                needed,
                upstream,
                vjp,
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
