"""TensorFlow: gradients that keep no graph alive, grouped matmuls and MLPs.

`tf.custom_gradient`, and with it `keras.remat`, registers every gradient that it traces
under a new name, for ever, and with the gradient the whole graph.

Grouped matmuls are loops over blocks for XLA, and else go expert by expert.

Axes: R rows, E experts, D hidden, H mlp.
"""

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from keras_moe._compat import overridden_gradient
from keras_moe.ops.kernels import _block_loops
from keras_moe.ops.kernels._block_loops import Weights, activate


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
        return tape.gradient(outputs, inputs, list(upstream))

    return custom_gradient(forward, backward, *inputs)


def vjp(function, *inputs):
    """The value of a function, and a function from its gradient to the inputs'."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(*inputs)
    return outputs, lambda upstream: tape.gradient(outputs, inputs, upstream)


def for_xla():
    """Whether XLA compiles what is traced now, and wants to know every shape."""
    # A function that has been traced for itself keeps its graph when a compiled one
    # calls it later. (TensorFlow 2.21 has nothing public for this, nor for tapes.)
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
        rows, kernels, group_sizes = inputs
        gradients = _block_loops.matmul_backward(rows, kernels, group_sizes, upstream)
        return *gradients, None

    return custom_gradient(forward, backward, rows, kernels, group_sizes)


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    if for_xla():
        return mlp_with_loops(rows, group_sizes, weights, activation)
    *groups, rest = _split(rows, group_sizes)
    outputs = []
    stacked = [None if x is None else tf.unstack(x) for x in weights]
    for expert, x in enumerate(groups):
        own = Weights._make(x and x[expert] for x in stacked)
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
        return Weights._make(next(present) if x else None for x in exists)

    def forward(*inputs):
        # An (R, H) array that no tape will read is not written.
        outputs, kept = run(inputs, record.could_possibly_record())
        return outputs, (inputs, kept)

    def backward(residuals, upstream):
        inputs, kept = residuals
        rows, group_sizes, *present = inputs
        own, kept = all_weights(present), kept or run(inputs, True)[1]
        dx, dw = _block_loops.mlp_backward(
            rows, group_sizes, own, kept, upstream, activation, vjp
        )
        return dx, None, *(x for x in dw if x is not None)

    exists = [x is not None for x in weights]
    present = [x for x in weights if x is not None]
    return custom_gradient(forward, backward, rows, group_sizes, *present)
