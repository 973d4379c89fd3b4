"""Rows moved by index, with gradients that move rows back.

Differentiation would scatter although the plan has the inverse index: on CPUs a scatter
of rows costs several times the gather.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.empty import take


def take_rows(table: Any, rows: Any, readers: Any) -> Any:
    """`table[rows]`, and zeros for -1."""
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.take_rows(table, rows, readers)
    return take_rows_reference(table, rows, readers)


def weighted_sum_of_rows(table: Any, weights: Any, rows: Any, readers: Any) -> Any:
    """`sum over k of weights[:, k] * table[rows[:, k]]`, in float32."""
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.weighted_sum_of_rows(table, weights, rows, readers)
    return weighted_sum_of_rows_reference(table, weights, rows, readers)


def _kernels(table):
    """The backend's own functions if it has some for this table, or None."""
    if keras.backend.backend() != "torch":
        return None
    from keras_moe.ops.kernels import row_moves_torch

    return row_moves_torch if row_moves_torch.is_valid(table) else None


def take_rows_reference(table: Any, rows: Any, readers: Any) -> Any:
    """`take_rows` by `keras.ops`, see there."""

    # Indices are arguments, too: JAX cannot close over what it traces.
    @ops.custom_gradient
    def taken(table, rows, readers):
        def gradient(*args, upstream=None):
            # PyTorch passes the inputs, too, and the gradient by name.
            upstream = args[0] if upstream is None else upstream
            total = 0.0
            for k in range(readers.shape[-1]):
                total = total + _rows_or_zeros(upstream, readers[:, k])
            return ops.cast(total, table.dtype), None, None

        chosen = take(table, ops.maximum(rows, 0))
        chosen = ops.where((rows >= 0)[:, None], chosen, ops.zeros_like(chosen))
        return chosen, gradient

    return taken(table, rows, readers)


def weighted_sum_of_rows_reference(
    table: Any, weights: Any, rows: Any, readers: Any
) -> Any:
    """`weighted_sum_of_rows` by `keras.ops`, see there."""

    @ops.custom_gradient
    def weighted_sum(table, weights, rows, readers):
        # An unrolled sum is much cheaper than a (T, K, D) tensor and its sum.
        total = 0.0
        for k in range(rows.shape[-1]):
            chosen = _rows_or_zeros(table, rows[:, k])
            total = total + weights[:, k : k + 1] * chosen

        def gradient(*args, upstream=None):
            upstream = args[0] if upstream is None else upstream
            reader = ops.maximum(readers, 0)
            place = ops.arange(ops.shape(table)[0], dtype="int32")
            own = ops.equal(take(rows, reader), place[:, None])
            own = own & (readers >= 0)[:, None]
            weight = ops.where(own, take(weights, reader), 0.0)
            weight = ops.sum(weight, axis=-1, keepdims=True)
            table_gradient = weight * _rows_or_zeros(upstream, readers)
            weight_gradients = [
                ops.sum(upstream * _rows_or_zeros(table, rows[:, k]), axis=-1)
                for k in range(rows.shape[-1])
            ]
            weight_gradients = ops.stack(weight_gradients, axis=-1)
            table_gradient = ops.cast(table_gradient, table.dtype)
            return table_gradient, weight_gradients, None, None

        return total, gradient

    return weighted_sum(table, weights, rows, readers)


def _rows_or_zeros(table, rows):
    """float32 rows of the table, zeros for -1: a row without readers may be NaN."""
    chosen = ops.cast(take(table, ops.maximum(rows, 0)), "float32")
    return ops.where((rows >= 0)[:, None], chosen, 0.0)
