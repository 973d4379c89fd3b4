"""Grouped matmul and MLP on TensorFlow: block loops for XLA, else expert by expert.

Axes: R rows, E experts, D hidden, H mlp.
"""

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from keras_moe.ops.kernels import _block_loops
from keras_moe.ops.kernels._block_loops import Weights, activate
from keras_moe.ops.kernels._gradients_tensorflow import custom_gradient, vjp


def for_xla():
    """Whether XLA compiles what is traced now, and wants to know every shape.

    A function that has been traced for itself keeps its graph when a compiled function
    calls it later. (TensorFlow 2.21 has nothing public for this, nor for tapes.)
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


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


def matmul_with_loops(rows, kernels, group_sizes):
    def forward(*inputs):
        return _block_loops.matmul_forward(*inputs), inputs

    def backward(inputs, upstream):
        return *_block_loops.matmul_backward(*inputs, upstream), None

    return custom_gradient(forward, backward, rows, kernels, group_sizes)


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
    def run(inputs, keep):
        rows, group_sizes, *present = inputs
        own = all_weights(present)
        return _block_loops.mlp_forward(rows, group_sizes, own, activation, keep)

    def all_weights(present):
        present = iter(present)
        return Weights(*(next(present) if is_there else None for is_there in exists))

    def forward(*inputs):
        # An (R, H) array that no tape will read is not written.
        outputs, kept = run(inputs, record.could_possibly_record())
        return outputs, (inputs, kept)

    def backward(residuals, upstream):
        inputs, kept = residuals
        rows, group_sizes, *present = inputs
        own, kept = all_weights(present), kept or run(inputs, True)[1]
        dx, dw = _block_loops.mlp_backward(
            rows, group_sizes, own, activation, kept, upstream, vjp
        )
        return dx, None, *(x for x in dw if x is not None)

    exists = [x is not None for x in weights]
    present = [x for x in weights if x is not None]
    return custom_gradient(forward, backward, rows, group_sizes, *present)
