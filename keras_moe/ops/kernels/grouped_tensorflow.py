"""Grouped matmul and MLP on TensorFlow: block loops for XLA, else expert by expert.

Axes: R rows, E experts, D hidden, H mlp.
"""

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from keras_moe.ops.kernels import block_loops
from keras_moe.ops.kernels.block_loops import Weights, activate


def for_xla():
    """Whether XLA compiles what is traced now, and wants to know every shape.

    A function that has been traced for itself keeps its graph when a compiled function
    calls it later. (TensorFlow 2.21 has nothing public for this or the next function.)
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def for_gradients():
    """Whether a tape records what runs now, or may ask a traced function's gradient."""
    return record.could_possibly_record()


def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    # XLA refuses a split into sizes that it does not know; elsewhere loops would copy
    # their outputs in every step.
    if for_xla():
        return matmul_with_loops(rows, kernels, group_sizes)
    *groups, rest = _split(rows, group_sizes)
    outputs = [tf.matmul(*pair) for pair in zip(groups, tf.unstack(kernels))]
    zeros = tf.zeros((tf.shape(rest)[0], kernels.shape[2]), rows.dtype)
    return tf.concat([*outputs, zeros], axis=0)


def _split(rows, group_sizes):
    """The rows of each expert, and those of none."""
    rest = tf.shape(rows)[0] - tf.reduce_sum(group_sizes)
    return tf.split(rows, tf.concat([group_sizes, [rest]], axis=0))


@tf.custom_gradient
def matmul_with_loops(rows, kernels, group_sizes):
    def gradient(upstream):
        gradients = block_loops.matmul_backward(rows, kernels, group_sizes, upstream)
        return *gradients, None

    return block_loops.matmul_forward(rows, kernels, group_sizes), gradient


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    if for_xla():
        return mlp_with_loops(rows, group_sizes, weights, activation)
    *groups, rest = _split(rows, group_sizes)
    outputs = []
    stacked = [None if x is None else tf.unstack(x) for x in weights]
    for expert, x in enumerate(groups):
        own = Weights(*(x and x[expert] for x in stacked))
        hidden = activate(activation, *own.pre_activations(x))
        outputs.append(own.linear("output", hidden))
    return tf.concat([*outputs, tf.zeros_like(rest)], axis=0)


def mlp_with_loops(rows, group_sizes, weights, activation):
    present = [x for x in weights if x is not None]

    def all_weights(present):
        present = iter(present)
        return Weights(*(x if x is None else next(present) for x in weights))

    def run(rows, present, keep):
        weights = all_weights(present)
        return block_loops.mlp_forward(rows, group_sizes, weights, activation, keep)

    @tf.custom_gradient
    def grouped(rows, *present):
        # An (R, H) array that nothing reads is not written.
        outputs, kept = run(rows, present, for_gradients())

        def gradient(upstream):
            needed = kept or run(rows, present, True)[1]
            dx, dw = block_loops.mlp_backward(
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
