"""Grouped matmuls for NVIDIA GPUs: Pallas kernels, which Triton compiles.

Axes: R rows, E experts, D hidden, H mlp.

For GPUs XLA turns `lax.ragged_dot` into one product over experts x D. These kernels
multiply each row by its own expert's kernel alone. They mask what belongs to other
experts while they load, and write zeros for the rows of no expert. Blocks have fixed
sizes, so that a row's result does not depend on the other rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # not on this system
    _triton = None

from keras_moe.ops.kernels._block_loops import cut_into_blocks

triton: Any = _triton

# Rows and columns of a block of the result. The blocks that a step loads have as many
# bytes for each dtype, and three steps of them fit into 99 KB of shared memory.
BLOCK = 128
BYTES_OF_A_STEP = 128
# Older versions of JAX have no masked loads here.
DTYPES = ("bfloat16", "float16", "float32") if hasattr(triton, "load") else ()


def _load(x, index, row_is_own, column, width):
    """A block of own rows, with zeros for others and beyond the last column."""
    mask = row_is_own[:, None]
    return triton.load(x.at[index], mask=mask & (column < width)[None], other=0)


def _product(x, y, x_axis, y_axis):
    """The float32 products of two blocks, summed over an axis of each."""
    axes = ((x_axis,), (y_axis,)), ((), ())
    return lax.dot_general(x, y, axes, preferred_element_type="float32")


def _rows_body(blocks, rows, kernels, outputs, *, transposed, step):
    """A block of `rows @ kernels[expert]`, or of the product with the transpose."""
    num_experts, dim, width = kernels.shape
    if transposed:
        dim, width = width, dim
    expert, start, end = (blocks[pl.program_id(0), i] for i in range(3))
    row = start + jnp.arange(BLOCK)
    column = pl.program_id(1) * BLOCK + jnp.arange(BLOCK)
    own, inside = row < end, column < width

    def add(i, total):
        k = i * step + jnp.arange(step)
        within = k < dim
        x = _load(rows, (row[:, None], k[None]), own, k, dim)
        if transposed:
            index = (expert, column[:, None], k[None])
            kernel = _load(kernels, index, inside, k, dim)
        else:
            index = (expert, k[:, None], column[None])
            kernel = _load(kernels, index, within, column, width)
        return total + _product(x, kernel, 1, int(transposed))

    # The rows of no expert are the last group.
    steps = jnp.where(expert < num_experts, jnp.int32(pl.cdiv(dim, step)), 0)
    total = lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, BLOCK), "float32"))
    triton.store(
        outputs.at[row[:, None], column[None]],
        total.astype(outputs.dtype),
        mask=own[:, None] & inside[None],
    )


def _kernels_body(ends, rows, upstream, outputs, *, step):
    """A block of `rows.T @ upstream` of an expert's rows."""
    _, dim, width = outputs.shape
    expert = pl.program_id(0)
    start, end = ends[expert], ends[expert + 1]
    d = pl.program_id(1) * BLOCK + jnp.arange(BLOCK)
    h = pl.program_id(2) * BLOCK + jnp.arange(BLOCK)

    def add(i, total):
        row = start + i * step + jnp.arange(step)
        x = _load(rows, (row[:, None], d[None]), row < end, d, dim)
        dy = _load(upstream, (row[:, None], h[None]), row < end, h, width)
        return total + _product(x, dy, 0, 0)

    steps = pl.cdiv(end - start, step)
    total = lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, BLOCK), "float32"))
    triton.store(
        outputs.at[expert, d[:, None], h[None]],
        total.astype(outputs.dtype),
        mask=(d < dim)[:, None] & (h < width)[None],
    )


def _call(body, grid, shape, dtype, interpret, *inputs):
    body = functools.partial(body, step=BYTES_OF_A_STEP // dtype.itemsize)
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name=body.func.__name__.strip("_"),
    )(*inputs)


def rows_by_kernels(rows, kernels, group_sizes, transposed=False, interpret=False):
    """Each row times its expert's kernel, or times the kernel's transpose."""
    num_rows = rows.shape[0]
    width = kernels.shape[1 if transposed else 2]
    rest = num_rows - jnp.sum(group_sizes)
    sizes = jnp.append(group_sizes, rest.astype(group_sizes.dtype))
    blocks, _ = cut_into_blocks(sizes, (BLOCK,), num_rows)
    return _call(
        functools.partial(_rows_body, transposed=transposed),
        (blocks.shape[0], pl.cdiv(width, BLOCK)),
        (num_rows, width),
        rows.dtype,
        interpret,
        blocks,
        rows,
        kernels,
    )


def forward(rows, kernels, group_sizes, *, interpret=False):
    """`grouped_jax.ragged_forward`."""
    return rows_by_kernels(rows, kernels, group_sizes, interpret=interpret)


def backward(rows, kernels, group_sizes, upstream, *, interpret=False):
    """`grouped_jax.ragged_backward`."""
    num_experts, dim, width = kernels.shape
    kernel_gradient = _call(
        _kernels_body,
        (num_experts, pl.cdiv(dim, BLOCK), pl.cdiv(width, BLOCK)),
        kernels.shape,
        kernels.dtype,
        interpret,
        jnp.append(jnp.zeros(1, "int32"), jnp.cumsum(group_sizes, dtype="int32")),
        rows,
        upstream,
    )
    row_gradient = rows_by_kernels(upstream, kernels, group_sizes, True, interpret)
    return row_gradient, kernel_gradient
