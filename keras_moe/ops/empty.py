"""Operations on tensors that may have no elements, such as a batch without images.

Some backends refuse these, or return another shape than NumPy does.
"""

from typing import Any

from keras import ops


def max_along(x: Any, axis: int, keepdims: bool = False) -> Any:
    """`ops.max` along one axis, where another may be empty."""
    return _along(ops.max, x, axis, keepdims)


def min_along(x: Any, axis: int, keepdims: bool = False) -> Any:
    """`ops.min` along one axis, where another may be empty; see `max_along`."""
    return _along(ops.min, x, axis, keepdims)


def take(table: Any, rows: Any) -> Any:
    """`table[rows]`, also if there are neither."""
    if 0 not in tuple(table.shape):
        return ops.take(table, rows, axis=0)
    return ops.zeros((*ops.shape(rows), *table.shape[1:]), table.dtype)


def _along(reduce, x, axis, keepdims):
    # The sum has the shape that the extremum has, and no entry that could be wrong.
    reduce = ops.sum if 0 in tuple(x.shape) else reduce
    return reduce(x, axis=axis, keepdims=keepdims)
