"""Custom gradients on PyTorch, and gathers of rows on CPUs in one pass each.

Axes: M rows of the table, R gathered rows, T tokens, K choices, D hidden.
"""

import torch

from keras_moe._compat import functions_are_transformed


def custom_gradient(forward, backward, *inputs):
    """See `keras_moe.ops._primitives.custom_gradient`."""
    return _CustomGradient.apply(forward, backward, *inputs)


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *inputs):
        outputs, residuals = forward(*inputs)
        ctx.save_for_backward(*residuals)
        ctx.gradient = backward
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        return None, None, *ctx.gradient(ctx.saved_tensors, *upstream)


def is_transformed():
    """See `keras_moe.ops._primitives.is_transformed`."""
    return functions_are_transformed(torch)


def gathers_are_valid(table):
    """Whether the functions below take this table (M, D)."""
    # They look at the indices, which an accelerator would wait for, and a graph lacks.
    is_here = table.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_here and table.numel() > 0


def gather_rows(table, rows, readers):
    """See `keras_moe.ops._rows`."""
    return _GatherRows.apply(table, rows, readers)


def combine_rows(table, weights, rows, readers):
    """See `keras_moe.ops._rows`."""
    return _CombineRows.apply(table, weights, rows, readers)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, rows, readers):
        ctx.save_for_backward(readers)
        return _rows_or_zeros(table, rows)

    @staticmethod
    def backward(ctx, upstream):
        (readers,) = ctx.saved_tensors
        return _sum_of_rows(upstream, readers).to(upstream.dtype), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, weights, rows, readers):
        ctx.save_for_backward(table, weights, rows, readers)
        return _sum_of_rows(table, rows, weights)

    @staticmethod
    def backward(ctx, upstream):
        table, weights, rows, readers = ctx.saved_tensors
        is_there = rows >= 0
        weight_gradients = None
        # One gather serves both gradients.
        gradients = _rows_or_zeros(upstream, readers)
        if ctx.needs_input_grad[1]:
            products = torch.sum(table * gradients, dim=-1).to(weights.dtype)
            weight_gradients = torch.zeros_like(weights)
            weight_gradients[is_there] = products[rows[is_there]]
        row_weights = gradients.new_zeros(len(gradients))
        row_weights[rows[is_there]] = weights[is_there]
        # In place, unless somebody differentiates this gradient.
        multiply = torch.mul if torch.is_grad_enabled() else torch.Tensor.mul_
        gradients = multiply(gradients, row_weights[:, None])
        return gradients.to(table.dtype), weight_gradients, None, None


def _rows_or_zeros(table, rows):
    if table.numel() == 0:
        return table.new_zeros((len(rows), table.shape[1]))
    taken = table.index_select(0, rows.clamp(min=0))
    # A multiplication by 0 would keep what is not finite.
    return taken.index_fill_(0, (rows < 0).nonzero()[:, 0], 0)


def _sum_of_rows(table, rows, weights=None):
    """The sums over K of the rows (T, K), -1 for none, in float32 (T, D)."""
    if table.numel() == 0:
        return table.new_zeros((len(rows), table.shape[1]), dtype=torch.float32)
    table = table.float().contiguous()
    is_there = rows >= 0
    if is_there.all():
        offsets = None
    else:
        counts = is_there.sum(1, dtype=rows.dtype)
        offsets = counts.cumsum(0, dtype=rows.dtype) - counts
        weights = None if weights is None else weights[is_there]
        rows = rows[is_there]
    return torch.nn.functional.embedding_bag(
        rows, table, offsets, mode="sum", per_sample_weights=weights
    )
