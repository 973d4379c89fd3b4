"""Grouped matmul on JAX: block loops on CPUs, `jax.lax.ragged_dot` elsewhere."""

import jax
from jax import lax

from keras_moe.ops.kernels import block_loops

# (R, D) and (R, H) to (E, D, H): the rows are ragged and summed over.
_ROWS_TIMES_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
# (R, H) and (E, D, H) to (R, D).
_ROWS_TIMES_TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [2]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def ragged_forward(rows, kernels, group_sizes):
    return lax.ragged_dot(rows, kernels, group_sizes)


def ragged_backward(rows, kernels, group_sizes, upstream):
    return (
        lax.ragged_dot_general(upstream, kernels, group_sizes, _ROWS_TIMES_TRANSPOSED),
        lax.ragged_dot_general(rows, upstream, group_sizes, _ROWS_TIMES_ROWS),
    )


@jax.jit
def _forward(rows, kernels, group_sizes):
    # Block loops need a number, which a symbolic dimension is not.
    if not isinstance(rows.shape[0], int):
        return ragged_forward(rows, kernels, group_sizes)
    # On CPUs ragged_dot computes every expert on every row.
    return lax.platform_dependent(
        rows, kernels, group_sizes, cpu=block_loops.forward, default=ragged_forward
    )


@jax.jit
def _backward(rows, kernels, group_sizes, upstream):
    if not isinstance(rows.shape[0], int):
        return ragged_backward(rows, kernels, group_sizes, upstream)
    return lax.platform_dependent(
        rows,
        kernels,
        group_sizes,
        upstream,
        cpu=block_loops.backward,
        default=ragged_backward,
    )


@jax.custom_vjp
def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    return _forward(rows, kernels, group_sizes)


def _forward_and_residuals(rows, kernels, group_sizes):
    return _forward(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _gradients(residuals, upstream):
    return *_backward(*residuals, upstream), None


grouped_matmul.defvjp(_forward_and_residuals, _gradients)
