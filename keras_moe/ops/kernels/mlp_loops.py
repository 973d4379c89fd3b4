"""Grouped MLPs as loops over blocks of rows, on `keras.ops`.

Axes: R rows, E experts, D hidden, H mlp.

Each block of `block_loops` goes through the whole MLP of its expert, so that its hidden
rows stay in a cache. (A matmul of few rows is slow, and a block takes a copy of the
weights: short tiles that waste fewer rows are slower.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.kernels import block_loops


class Weights(NamedTuple):
    """The weights of all experts, or of one; None where there is no such weight."""

    hidden_kernel: Any
    output_kernel: Any
    hidden_bias: Any
    output_bias: Any
    gate_kernel: Any
    gate_bias: Any

    def linear(self, name, x):
        """One layer of one expert."""
        outputs = ops.matmul(x, getattr(self, f"{name}_kernel"))
        bias = getattr(self, f"{name}_bias")
        return outputs if bias is None else outputs + bias

    def pre_activations(self, x):
        """The hidden layer's outputs, and the gate's, which the activation reads."""
        names = ("hidden",) if self.gate_kernel is None else ("hidden", "gate")
        return tuple(self.linear(name, x) for name in names)

    def map(self, function):
        """The results of a function of each weight."""
        return Weights(*(None if x is None else function(x) for x in self))


def activate(activation, hidden, gate=None):
    """The inputs of the output layer."""
    return activation(hidden) if gate is None else activation(gate) * hidden


def forward(
    rows: Any, group_sizes: Any, weights: Weights, activation: Callable, keep: bool
) -> tuple[Any, tuple]:
    """Each row through the MLP of its expert."""
    num_experts, _, width = weights.hidden_kernel.shape
    sizes = block_loops.block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = block_loops.padded(rows, sizes[-1])

    def update(size, expert, at, own, *outputs):
        own_weights = weights.map(lambda x: block_loops.of_expert(x, expert))
        kept = own_weights.pre_activations(block_loops.rows_at(inputs, at, size))
        values = own_weights.linear("output", activate(activation, *kept))
        values = (values, *kept) if keep else (values,)
        return tuple(
            block_loops.write(old, at, own, new)
            for old, new in zip(outputs, values, strict=True)
        )

    widths = [rows.shape[1]]
    if keep:
        widths += [width] * (1 if weights.gate_kernel is None else 2)
    outputs = [ops.zeros((num_rows, width), rows.dtype) for width in widths]
    outputs = block_loops.for_each_block(group_sizes, sizes, num_rows, outputs, update)
    outputs, *kept = (block_loops.without_padding(x, rows) for x in outputs)
    return outputs, tuple(kept)


def backward(
    rows: Any,
    group_sizes: Any,
    weights: Weights,
    activation: Callable,
    kept: tuple,
    upstream: Any,
    vjp: Callable,
) -> tuple[Any, Weights]:
    """The gradient of `forward`."""
    num_experts = weights.hidden_kernel.shape[0]
    sizes = block_loops.block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = block_loops.padded(rows, sizes[-1])
    upstream, *kept = (block_loops.padded(x, sizes[-1])[0] for x in (upstream, *kept))

    def update(size, expert, at, own, row_gradients, *weight_gradients):
        def masked(x):
            # Zero times what a neighbour holds need not be zero.
            return ops.where(own, x, ops.zeros((), x.dtype))

        own_weights = weights.map(lambda x: block_loops.of_expert(x, expert))
        x, dy = (masked(block_loops.rows_at(z, at, size)) for z in (inputs, upstream))
        activated, pullback = vjp(
            lambda *values: activate(activation, *values),
            *(block_loops.rows_at(z, at, size) for z in kept),
        )
        activated_gradient = ops.einsum("rd,hd->rh", dy, own_weights.output_kernel)
        linear = {"output": (masked(activated), dy)}
        dx = 0.0
        for name, gradient in zip(("hidden", "gate"), pullback(activated_gradient)):
            gradient = masked(gradient)
            linear[name] = (x, gradient)
            kernel = getattr(own_weights, f"{name}_kernel")
            dx = dx + ops.einsum("rh,dh->rd", gradient, kernel)
        changes = {}
        for name, (x, dy) in linear.items():
            changes[f"{name}_kernel"] = ops.einsum("rd,rh->dh", x, dy)
            changes[f"{name}_bias"] = ops.sum(ops.cast(dy, "float32"), axis=0)
        # An expert with more rows than the largest block has several blocks.
        weight_gradients = (
            block_loops.add_to_expert(total, expert, changes[name])
            for total, name in zip(weight_gradients, names, strict=True)
        )
        return block_loops.write(row_gradients, at, own, dx), *weight_gradients

    names = [name for name, x in zip(weights._fields, weights) if x is not None]
    gradients = [ops.zeros((num_rows, rows.shape[1]), rows.dtype)]
    gradients += [ops.zeros(getattr(weights, name).shape, "float32") for name in names]
    row_gradients, *totals = block_loops.for_each_block(
        group_sizes, sizes, num_rows, gradients, update
    )
    totals = dict(zip(names, totals, strict=True))
    weight_gradients = Weights(
        *(
            None if x is None else ops.cast(totals[name], x.dtype)
            for name, x in zip(weights._fields, weights)
        )
    )
    return block_loops.without_padding(row_gradients, rows), weight_gradients
