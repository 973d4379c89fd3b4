"""Grouped matmuls and MLPs as loops over blocks of rows, on `keras.ops`, for XLA.

Axes: R rows, E experts, D hidden, H mlp, N blocks.

XLA wants static shapes, and padding to the busiest expert is too expensive. Each
expert's rows are cut into full blocks and one block for the rest, whose static size is
the next one in a short table. For each size one loop runs over the blocks of that size
and updates the output in place. (One loop with a switch over the sizes copies its
output in every step on CPUs.) A block that is longer than its rows reads its
neighbours' rows too; their outputs are not written. For an MLP each block goes through
all layers of its expert, so that its hidden rows stay in a cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
from keras import ops

from keras_moe._types import Size, Tensor

# Block sizes over the mean number of rows of an expert. They are closest where
# near-balanced loads lie: there 4 to 7% of the matmuls' rows are waste, at skewed loads
# 9%. One is for MoE++, where a third of the choices may have no row. Ten sizes would
# waste up to 3% less, and take half as long again to compile.
_FRACTIONS = (0.125, 0.3, 0.5, 0.7, 0.85, 1.0, 1.075)
# Where TensorFlow does not know the number of rows while it traces, as in `fit`, whose
# last batch may be smaller. For small images an expert has few rows.
_SIZES_FOR_UNKNOWN_ROWS = (16, 32, 64, 112, 208, 416)


def block_sizes(num_rows: int | None, num_experts: int) -> tuple[int, ...]:
    """The static numbers of rows that a block may have, in increasing order."""
    if num_rows is None:
        return _SIZES_FOR_UNKNOWN_ROWS
    mean = num_rows / num_experts
    sizes = {8 * math.ceil(mean * fraction / 8) for fraction in _FRACTIONS}
    return tuple(sorted({min(size, num_rows) for size in sizes}))


def cut_into_blocks(
    group_sizes: Tensor, sizes: tuple[int, ...], num_rows: Size
) -> tuple[Tensor, Tensor]:
    """Each block's expert, first and last row (N, 3), and each size's first block."""
    longest, num_experts = sizes[-1], group_sizes.shape[0]
    max_blocks = num_rows // longest + num_experts
    group_ends = ops.cumsum(group_sizes)
    counts = (group_sizes + (longest - 1)) // longest
    block_ends = ops.cumsum(counts)
    index = ops.arange(max_blocks, dtype="int32")
    before = ops.cast(block_ends[None, :] <= index[:, None], "int32")
    # Past the last block there is no expert; any will do there.
    expert = ops.minimum(ops.sum(before, axis=1), num_experts - 1)
    position = index - ops.take(block_ends - counts, expert)
    start = ops.take(group_ends - group_sizes, expert) + position * longest
    end = ops.minimum(ops.take(group_ends, expert), start + longest)

    longer = (end - start)[:, None] > ops.convert_to_tensor(sizes, "int32")[None, :]
    size = ops.sum(ops.cast(longer, "int32"), axis=1)
    size = ops.where(index < block_ends[-1], size, len(sizes))
    # One sort of size and index, packed in one number, is cheaper than an argsort.
    order = ops.sort(size * max_blocks + index) % max_blocks
    smaller = size[None, :] < ops.arange(len(sizes) + 1, dtype="int32")[:, None]
    blocks = ops.take(ops.stack([expert, start, end], axis=1), order, axis=0)
    return blocks, ops.sum(ops.cast(smaller, "int32"), axis=1)


def slice_of(start, end, size, num_rows):
    """The first row of a slice of `size` rows, and (size, 1) which are the block's."""
    # A slice must not reach beyond the last row, so the last ones begin before their
    # block.
    at = ops.minimum(start, num_rows - size)
    row = (at + ops.arange(size, dtype="int32"))[:, None]
    return at, ops.logical_and(row >= start, row < end)


def for_each_block(group_sizes, sizes, num_rows, outputs, update):
    """Runs `outputs = update(size, expert, at, own, *outputs)` for every block."""
    blocks, begins = cut_into_blocks(group_sizes, sizes, num_rows)
    begins = ops.unstack(begins, num=len(sizes) + 1)
    for k, size in enumerate(sizes):

        def body(i, *outputs, size=size):
            block = ops.reshape(slice_at(blocks, (i, 0), (1, 3)), (3,))
            expert, start, end = ops.unstack(block, num=3)
            at, own = slice_of(start, end, size, num_rows)
            return i + 1, *update(size, expert, at, own, *outputs)

        def unfinished(i, *outputs, end=begins[k + 1]):
            return i < end

        _, *outputs = ops.while_loop(unfinished, body, (begins[k], *outputs))
    return outputs


def padded(rows, size):
    """`rows` with at least as many rows as the largest block, and their number."""
    num_rows = rows.shape[0]
    if num_rows is not None:
        return rows, num_rows
    missing = ops.maximum(size - ops.shape(rows)[0], 0)
    rows = ops.pad(rows, [[0, missing], [0, 0]])
    return rows, ops.shape(rows)[0]


def without_padding(rows, like):
    return rows if like.shape[0] is not None else rows[: ops.shape(like)[0]]


def slice_at(x, begin, shape):
    """`ops.slice` from where a program computes."""
    if keras.backend.backend() != "tensorflow":
        return ops.slice(x, begin, shape)
    from tensorflow.compiler.tf2xla.python.xla import dynamic_slice

    # For `tf.slice` XLA takes the begin as a constant, with the inputs that it is
    # computed from, and compiles once more for every batch.
    return dynamic_slice(x, ops.stack(begin), shape)


def rows_at(rows, at, size):
    return slice_at(rows, (at, 0), (size, rows.shape[1]))


def of_expert(stacked, expert):
    _, *shape = stacked.shape
    begin = (expert, *([0] * len(shape)))
    return ops.reshape(slice_at(stacked, begin, (1, *shape)), shape)


def add_to_expert(stacked, expert, change):
    """Adds to one expert's part of a stacked float32 gradient."""
    change = ops.cast(change, "float32")[None]
    begin = (expert, *([0] * (len(stacked.shape) - 1)))
    old = slice_at(stacked, begin, change.shape)
    return ops.slice_update(stacked, begin, old + change)


def write(outputs, at, own, values):
    """Writes a block's own rows among `values`."""
    old = rows_at(outputs, at, values.shape[0])
    return ops.slice_update(outputs, (at, 0), ops.where(own, values, old))


def matmul_forward(rows: Tensor, kernels: Tensor, group_sizes: Tensor) -> Tensor:
    """Each row times the kernel of its expert."""
    num_experts, _, width = kernels.shape
    sizes = block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = padded(rows, sizes[-1])

    def update(size, expert, at, own, outputs):
        values = ops.matmul(rows_at(inputs, at, size), of_expert(kernels, expert))
        return (write(outputs, at, own, values),)

    outputs = ops.zeros((num_rows, width), rows.dtype)
    (outputs,) = for_each_block(group_sizes, sizes, num_rows, [outputs], update)
    return without_padding(outputs, rows)


def matmul_backward(
    rows: Tensor, kernels: Tensor, group_sizes: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `matmul_forward` in the rows and the kernels."""
    num_experts, dim, width = kernels.shape
    sizes = block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = padded(rows, sizes[-1])
    upstream, _ = padded(upstream, sizes[-1])

    def update(size, expert, at, own, row_gradients, kernel_gradients):
        x, dy = rows_at(inputs, at, size), rows_at(upstream, at, size)
        dx = ops.einsum("rh,dh->rd", dy, of_expert(kernels, expert))
        # Both: zero times what a neighbour holds need not be zero.
        x, dy = (ops.where(own, z, ops.zeros((), z.dtype)) for z in (x, dy))
        # An expert with more rows than the largest block has several blocks.
        dk = ops.einsum("rd,rh->dh", x, dy)
        return (
            write(row_gradients, at, own, dx),
            add_to_expert(kernel_gradients, expert, dk),
        )

    gradients = [
        ops.zeros((num_rows, dim), rows.dtype),
        ops.zeros((num_experts, dim, width), "float32"),
    ]
    row_gradients, kernel_gradients = for_each_block(
        group_sizes, sizes, num_rows, gradients, update
    )
    return (
        without_padding(row_gradients, rows),
        ops.cast(kernel_gradients, kernels.dtype),
    )


class Weights(NamedTuple):
    """The weights of all experts, or of one; None where there is no such weight."""

    hidden_kernel: Tensor
    output_kernel: Tensor
    hidden_bias: Tensor | None
    output_bias: Tensor | None
    gate_kernel: Tensor | None
    gate_bias: Tensor | None

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
        return Weights._make(None if x is None else function(x) for x in self)


def activate(activation, hidden, gate=None):
    """The inputs of the output layer."""
    return activation(hidden) if gate is None else activation(gate) * hidden


def mlp_forward(
    rows: Tensor,
    group_sizes: Tensor,
    weights: Weights,
    activation: Callable,
    keep: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (R, D) of the experts' MLPs, and activation inputs (R, H) if `keep`."""
    num_experts, _, width = weights.hidden_kernel.shape
    sizes = block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = padded(rows, sizes[-1])

    def update(size, expert, at, own, *outputs):
        own_weights = weights.map(lambda x: of_expert(x, expert))
        kept = own_weights.pre_activations(rows_at(inputs, at, size))
        values = own_weights.linear("output", activate(activation, *kept))
        values = (values, *kept) if keep else (values,)
        return tuple(
            write(old, at, own, new) for old, new in zip(outputs, values, strict=True)
        )

    widths = [rows.shape[1]]
    if keep:
        widths += [width] * (1 if weights.gate_kernel is None else 2)
    outputs = [ops.zeros((num_rows, width), rows.dtype) for width in widths]
    outputs = for_each_block(group_sizes, sizes, num_rows, outputs, update)
    outputs, *kept = (without_padding(x, rows) for x in outputs)
    return outputs, tuple(kept)


def mlp_backward(
    rows: Tensor,
    group_sizes: Tensor,
    weights: Weights,
    kept: Sequence[Tensor],
    upstream: Tensor,
    activation: Callable,
    vjp: Callable,
) -> tuple[Tensor, Weights]:
    """The gradients of `mlp_forward` in rows and weights; `vjp` is the backend's."""
    num_experts = weights.hidden_kernel.shape[0]
    sizes = block_sizes(rows.shape[0], num_experts)
    inputs, num_rows = padded(rows, sizes[-1])
    upstream, *kept = (padded(x, sizes[-1])[0] for x in (upstream, *kept))

    def update(size, expert, at, own, row_gradients, *weight_gradients):
        def masked(x):
            # Zero times what a neighbour holds need not be zero.
            return ops.where(own, x, ops.zeros((), x.dtype))

        own_weights = weights.map(lambda x: of_expert(x, expert))
        x, dy = (masked(rows_at(z, at, size)) for z in (inputs, upstream))
        activated, pullback = vjp(
            lambda *values: activate(activation, *values),
            *(rows_at(z, at, size) for z in kept),
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
            add_to_expert(total, expert, changes[name])
            for total, name in zip(weight_gradients, names, strict=True)
        )
        return write(row_gradients, at, own, dx), *weight_gradients

    names = [name for name, x in zip(weights._fields, weights) if x is not None]
    gradients = [ops.zeros((num_rows, rows.shape[1]), rows.dtype)]
    gradients += [ops.zeros(getattr(weights, name).shape, "float32") for name in names]
    row_gradients, *totals = for_each_block(
        group_sizes, sizes, num_rows, gradients, update
    )
    totals = dict(zip(names, totals, strict=True))
    weight_gradients = Weights._make(
        None if x is None else ops.cast(totals[name], x.dtype)
        for name, x in zip(weights._fields, weights)
    )
    return without_padding(row_gradients, rows), weight_gradients
