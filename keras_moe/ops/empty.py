"""Operations on tensors that may have no elements, such as a batch without images.

Some backends refuse these, or return another shape than NumPy does.
"""

from typing import Any

from keras import ops


def max_along(x: Any, axis: int, keepdims: bool = False) -> Any:
    """`ops.max` along one axis, where another may be empty.

    Args:
        x: tensor.
        axis: axis to reduce, which is not empty.
        keepdims: whether the axis stays, with size 1.

    Returns:
        A tensor of the dtype of `x`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.empty import max_along
    >>> tuple(max_along(np.zeros((0, 3, 2), "float32"), axis=1).shape)
    (0, 2)
    """
    return _along(ops.max, x, axis, keepdims)


def min_along(x: Any, axis: int, keepdims: bool = False) -> Any:
    """`ops.min` along one axis, where another may be empty; see `max_along`.

    Args:
        x: tensor.
        axis: axis to reduce, which is not empty.
        keepdims: whether the axis stays, with size 1.

    Returns:
        A tensor of the dtype of `x`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.empty import min_along
    >>> tuple(min_along(np.zeros((0, 3), "float32"), axis=-1, keepdims=True).shape)
    (0, 1)
    """
    return _along(ops.min, x, axis, keepdims)


def take(table: Any, rows: Any) -> Any:
    """`table[rows]`, also if there are neither.

    Args:
        table: tensor (M, ...).
        rows: integers below M, of any shape.

    Returns:
        The shape of `rows`, followed by that of a row, in the dtype of `table`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.empty import take
    >>> tuple(take(np.zeros((0, 8), "float32"), np.zeros((0, 4), "int32")).shape)
    (0, 4, 8)
    """
    if 0 not in tuple(table.shape):
        return ops.take(table, rows, axis=0)
    return ops.zeros((*ops.shape(rows), *table.shape[1:]), table.dtype)


def _along(reduce, x, axis, keepdims):
    # The sum has the shape that the extremum has, and no entry that could be wrong.
    reduce = ops.sum if 0 in tuple(x.shape) else reduce
    return reduce(x, axis=axis, keepdims=keepdims)
