"""Scaled dot-product attention of heads.

Axes: B batch, N queries, M keys and values, h heads, d size of a head.
"""

from typing import Any

import keras
from keras import ops


def attend(query: Any, key: Any, value: Any, scale: float, mask: Any = None) -> Any:
    """`softmax(scale * query key^T) value` in each head.

    `keras.ops.dot_product_attention` copies queries, keys and values on PyTorch into
    an order that PyTorch's kernels do not need.

    Args:
        query: (B, N, h, d).
        key: (B, M, h, d).
        value: (B, M, h, d).
        scale: number by which products of queries and keys are multiplied.
        mask: boolean, broadcast to (B, h, N, M), which query attends to which key;
            None for all.

    Returns:
        A tensor (B, N, h, d).

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.attention import attend
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> tuple(attend(x, x, x, 0.5).shape)
    (1, 3, 2, 4)
    """
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import attention_torch

        query, key, value = map(ops.convert_to_tensor, (query, key, value))
        return attention_torch.attend(query, key, value, scale, mask)
    return attend_reference(query, key, value, scale, mask)


def attend_reference(
    query: Any, key: Any, value: Any, scale: float, mask: Any = None
) -> Any:
    """`attend` as Keras computes it.

    Args:
        query: (B, N, h, d).
        key: (B, M, h, d).
        value: (B, M, h, d).
        scale: number by which products of queries and keys are multiplied.
        mask: boolean, broadcast to (B, h, N, M), which query attends to which key;
            None for all.

    Returns:
        A tensor (B, N, h, d).

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.attention import attend_reference
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> tuple(attend_reference(x, x, x, 0.5).shape)
    (1, 3, 2, 4)
    """
    return ops.dot_product_attention(query, key, value, mask=mask, scale=scale)
