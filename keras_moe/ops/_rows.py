"""Gathers of rows and their weighted sums, whose gradients gather rows, too.

The plan has the inverse index, and on CPUs autodiff's scatters cost several gathers.

Axes: M rows of the table, R gathered rows, T tokens, K choices, D hidden; G groups, S
group_size, N slots of a group.
"""

import keras
from keras import ops

from keras_moe._types import DType, Size, Tensor
from keras_moe.ops._primitives import custom_gradient, take


def gather_rows(table: Tensor, rows: Tensor, readers: Tensor) -> Tensor:
    """`table[rows]` (R, D), zeros for -1; `readers` (M, K) are who reads each row."""
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.gather_rows(table, rows, readers)
    return gather_rows_reference(table, rows, readers)


def combine_rows(
    table: Tensor, weights: Tensor, rows: Tensor, readers: Tensor
) -> Tensor:
    """`sum over k of weights[:, k] * table[rows[:, k]]`; `readers` (M,) are tokens."""
    kernels = _kernels(table)
    if kernels is not None:
        return kernels.combine_rows(table, weights, rows, readers)
    return combine_rows_reference(table, weights, rows, readers)


def _kernels(table):
    """The backend's own functions if it has some for this table, or None."""
    if keras.backend.backend() != "torch":
        return None
    from keras_moe.ops.kernels import _gradients_torch

    return _gradients_torch if _gradients_torch.gathers_are_valid(table) else None


def gather_rows_reference(table: Tensor, rows: Tensor, readers: Tensor) -> Tensor:
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


def combine_rows_reference(
    table: Tensor, weights: Tensor, rows: Tensor, readers: Tensor
) -> Tensor:
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


def gather_slots(tokens: Tensor, owners: Tensor) -> Tensor:
    """The token (G, N, D) of each slot, zeros where `owners` (G, N) is -1."""
    if not _has_slot_kernel(tokens, owners):
        return _gather_slots(tokens, owners)
    num_tokens = tokens.shape[1]

    def forward(tokens, owners):
        return _gather_slots(tokens, owners), (owners,)

    def backward(residuals, upstream):
        (owners,) = residuals
        return _add_slots_jax(upstream, owners, num_tokens, upstream.dtype), None

    return custom_gradient(forward, backward, tokens, owners)


def add_slots(rows: Tensor, owners: Tensor, num_tokens: Size, dtype: DType) -> Tensor:
    """The sum (G, S, D) of each token's float32 rows (G, N, D), cast to the dtype."""
    dtype = keras.backend.standardize_dtype(dtype)
    if not _has_slot_kernel(rows, owners, num_tokens):
        return ops.cast(sum_slots(rows, owners, num_tokens), dtype)

    def forward(rows, owners):
        return _add_slots_jax(rows, owners, num_tokens, dtype), (owners,)

    def backward(residuals, upstream):
        return ops.cast(_gather_slots(upstream, *residuals), "float32"), None

    return custom_gradient(forward, backward, rows, owners)


def _gather_slots(tokens, owners):
    flat = ops.reshape(tokens, (-1, tokens.shape[-1]))
    inputs = take(flat, _flat_owners(owners, ops.shape(tokens)[1]))
    return ops.where((owners >= 0)[..., None], inputs, ops.zeros_like(inputs))


def sum_slots(rows: Tensor, owners: Tensor, num_tokens: Size) -> Tensor:
    """`add_slots` in the dtype of the rows."""
    rows = ops.where((owners >= 0)[..., None], rows, ops.zeros_like(rows))
    num_groups, dim = ops.shape(rows)[0], rows.shape[-1]
    # PyTorch's `segment_sum` would cost ten times as much.
    total = ops.scatter_update(
        ops.zeros((num_groups * num_tokens, dim), rows.dtype),
        ops.reshape(_flat_owners(owners, num_tokens), (-1, 1)),
        ops.reshape(rows, (-1, dim)),
        reduction="add",
    )
    return ops.reshape(total, (num_groups, num_tokens, dim))


def _add_slots_jax(rows, owners, num_tokens, dtype):
    from keras_moe.ops.kernels import _tpus_jax

    dtype = keras.backend.standardize_dtype(dtype)
    return _tpus_jax.add_slots(rows, owners, num_tokens, dtype, sum_slots)


def _has_slot_kernel(rows: Tensor, owners: Tensor, num_tokens: Size = 1) -> bool:
    """Whether JAX's own sum is used, which needs known sizes of at least 1."""
    sizes = (*rows.shape, *owners.shape, num_tokens)
    is_known = all(isinstance(x, int) and x > 0 for x in sizes)
    return keras.backend.backend() == "jax" and is_known


def _flat_owners(owners, num_tokens):
    """The token in each slot, counted over all groups, 0 if empty."""
    first = ops.arange(ops.shape(owners)[0], dtype="int32") * num_tokens
    return ops.where(owners >= 0, owners + first[:, None], 0)
