"""Grouped matmul on TensorFlow: block loops for XLA, else expert after expert."""

import tensorflow as tf

from keras_moe.ops.kernels import block_loops, tracing_tensorflow


def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    # See `grouped_mlp_tensorflow`.
    if tracing_tensorflow.for_xla():
        return with_loops(rows, kernels, group_sizes)
    return expert_by_expert(rows, kernels, group_sizes)


def expert_by_expert(rows, kernels, group_sizes):
    rest = tf.shape(rows)[0] - tf.reduce_sum(group_sizes)
    *groups, rest = tf.split(rows, tf.concat([group_sizes, [rest]], axis=0))
    outputs = [tf.matmul(*pair) for pair in zip(groups, tf.unstack(kernels))]
    zeros = tf.zeros((tf.shape(rest)[0], kernels.shape[2]), rows.dtype)
    return tf.concat([*outputs, zeros], axis=0)


@tf.custom_gradient
def with_loops(rows, kernels, group_sizes):
    def gradient(upstream):
        return *block_loops.backward(rows, kernels, group_sizes, upstream), None

    return block_loops.forward(rows, kernels, group_sizes), gradient
