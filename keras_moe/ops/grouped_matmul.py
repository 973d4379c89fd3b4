"""Many experts' matmuls on rows that are sorted by expert, without capacity.

Axes: R rows, E experts, D hidden, H mlp.
"""

from typing import Any

import keras
from keras import ops


def _checked(rows, kernels, group_sizes):
    """The three as tensors, if their shapes and dtypes fit."""
    rows, kernels = ops.convert_to_tensor(rows), ops.convert_to_tensor(kernels)
    group_sizes = ops.convert_to_tensor(group_sizes)
    shapes = tuple(tuple(x.shape) for x in (rows, kernels, group_sizes))
    rows_shape, kernels_shape, sizes_shape = shapes
    if (
        [len(shape) for shape in shapes] != [2, 3, 1]
        or rows_shape[1] != kernels_shape[1]
        or sizes_shape[0] != kernels_shape[0]
        or sizes_shape[0] == 0
    ):
        raise ValueError(
            "Expected rows of shape (rows, dim), kernels of shape (experts, dim, "
            "width) and group_sizes of shape (experts,), with at least one expert; "
            f"received: rows.shape={rows_shape}, kernels.shape={kernels_shape}, "
            f"group_sizes.shape={sizes_shape}"
        )
    rows_dtype, kernels_dtype, sizes_dtype = (
        keras.backend.standardize_dtype(x.dtype) for x in (rows, kernels, group_sizes)
    )
    if rows_dtype != kernels_dtype or "float" not in rows_dtype:
        raise ValueError(
            "Expected rows and kernels of one float dtype; "
            f"received: rows.dtype={rows_dtype}, kernels.dtype={kernels_dtype}"
        )
    if "int" not in sizes_dtype:
        raise ValueError(
            "Expected group_sizes of an integer dtype; "
            f"received: group_sizes.dtype={sizes_dtype}"
        )
    return rows, kernels, ops.cast(group_sizes, "int32")


def grouped_matmul(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """Multiplies each row by the kernel of its expert; the rows are sorted by expert.

    The first `group_sizes[0]` rows are expert 0's, the next `group_sizes[1]` rows
    expert 1's, and so on. No expert has a capacity: the cost grows with the number
    of rows, however they are distributed, and so does the memory.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        kernels: (E, D, H), in the dtype of `rows`.
        group_sizes: (E,), int: the number of rows of each expert, with a sum of at
            most R.

    Returns:
        (R, H) in the dtype of `rows`. The rows after the last group belong to no
        expert: their outputs and gradients are zeros, whatever they hold.

    Raises:
        ValueError: if the shapes or the dtypes do not fit.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.grouped_matmul import grouped_matmul
    >>> rows = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
    >>> kernels = np.array([[[1.0]], [[10.0]]], "float32")
    >>> outputs = grouped_matmul(rows, kernels, np.array([1, 2], "int32"))
    >>> np.array(outputs)[:, 0].tolist()
    [1.0, 20.0, 30.0, 0.0]
    """
    rows, kernels, group_sizes = _checked(rows, kernels, group_sizes)
    if 0 in (*rows.shape, kernels.shape[2]):
        return ops.matmul(rows, kernels[0])  # zeros, with a gradient
    backend = keras.backend.backend()
    if backend == "jax":
        from keras_moe.ops.kernels import grouped_matmul_jax as kernel
    elif backend == "tensorflow":
        from keras_moe.ops.kernels import grouped_matmul_tensorflow as kernel
    elif backend == "torch":
        from keras_moe.ops.kernels import grouped_matmul_torch as kernel
    else:
        return grouped_matmul_reference(rows, kernels, group_sizes)
    return kernel.grouped_matmul(rows, kernels, group_sizes)


def grouped_matmul_reference(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """`grouped_matmul` by a matmul of all rows for every expert, for tests."""
    rows, kernels, group_sizes = _checked(rows, kernels, group_sizes)
    ends = ops.cumsum(group_sizes)
    row = ops.arange(ops.shape(rows)[0], dtype="int32")
    total = 0.0
    for e in range(kernels.shape[0]):
        own = ops.logical_and(row >= ends[e] - group_sizes[e], row < ends[e])
        # Masked before the matmul: zero times an infinity would be NaN.
        inputs = ops.where(own[:, None], rows, ops.zeros_like(rows))
        total = total + ops.matmul(inputs, kernels[e])
    # Keras multiplies float64 in float32 on some backends.
    return ops.cast(total, rows.dtype)
