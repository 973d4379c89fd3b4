"""Gathers of rows and their weighted sums, whose gradients gather rows, too.

The plan has the inverse index, and on CPUs autodiff's scatters cost several gathers.

Axes: M rows of the table, R gathered rows, T tokens, K choices, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.primitives import custom_gradient, take


def gather_rows(table: Any, rows: Any, readers: Any) -> Any:
    """`table[rows]` (R, D), and zeros where `rows` is -1.

    `readers` (M, K) are the result's rows that read each row of the table, or -1.
    """
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.gather_rows(table, rows, readers)
    return gather_rows_reference(table, rows, readers)


def combine_rows(table: Any, weights: Any, rows: Any, readers: Any) -> Any:
    """`sum over k of weights[:, k] * table[rows[:, k]]`, float32 (T, D).

    `weights`, `rows` are (T, K); `readers` (M,) is each table row's token, or -1.
    """
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.combine_rows(table, weights, rows, readers)
    return combine_rows_reference(table, weights, rows, readers)


def _kernels(table):
    """The backend's own functions if it has some for this table, or None."""
    if keras.backend.backend() != "torch":
        return None
    from keras_moe.ops.kernels import gradients_torch

    return gradients_torch if gradients_torch.gathers_are_valid(table) else None


def gather_rows_reference(table: Any, rows: Any, readers: Any) -> Any:
    """`gather_rows` by `keras.ops`."""

    def forward(table, rows, readers):
        chosen = take(table, ops.maximum(rows, 0))
        chosen = ops.where((rows >= 0)[:, None], chosen, ops.zeros_like(chosen))
        return chosen, (readers,)

    def backward(residuals, upstream):
        (readers,) = residuals
        total = 0.0
        for k in range(readers.shape[-1]):
            total = total + _rows_or_zeros(upstream, readers[:, k])
        return ops.cast(total, upstream.dtype), None, None

    return custom_gradient(forward, backward, table, rows, readers)


def combine_rows_reference(table: Any, weights: Any, rows: Any, readers: Any) -> Any:
    """`combine_rows` by `keras.ops`."""

    def forward(table, weights, rows, readers):
        # An unrolled sum is much cheaper than a (T, K, D) tensor and its sum.
        total = 0.0
        for k in range(rows.shape[-1]):
            total = total + weights[:, k : k + 1] * _rows_or_zeros(table, rows[:, k])
        return total, (table, weights, rows, readers)

    def backward(residuals, upstream):
        table, weights, rows, readers = residuals
        reader = ops.maximum(readers, 0)
        index = ops.arange(ops.shape(table)[0], dtype="int32")
        own = ops.equal(take(rows, reader), index[:, None])
        own = own & (readers >= 0)[:, None]
        weight = ops.where(own, take(weights, reader), 0.0)
        weight = ops.sum(weight, axis=-1, keepdims=True)
        table_gradient = weight * _rows_or_zeros(upstream, readers)
        weight_gradients = [
            ops.sum(upstream * _rows_or_zeros(table, rows[:, k]), axis=-1)
            for k in range(rows.shape[-1])
        ]
        weight_gradients = ops.stack(weight_gradients, axis=-1)
        return ops.cast(table_gradient, table.dtype), weight_gradients, None, None

    return custom_gradient(forward, backward, table, weights, rows, readers)


def _rows_or_zeros(table, rows):
    """float32 rows of the table, zeros for -1: a row without readers may be NaN."""
    chosen = ops.cast(take(table, ops.maximum(rows, 0)), "float32")
    return ops.where((rows >= 0)[:, None], chosen, 0.0)
