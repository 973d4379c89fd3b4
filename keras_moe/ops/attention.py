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
    """
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import attention_torch

        query, key, value = map(ops.convert_to_tensor, (query, key, value))
        return attention_torch.attend(query, key, value, scale, mask)
    return attend_reference(query, key, value, scale, mask)


def attend_reference(
    query: Any, key: Any, value: Any, scale: float, mask: Any = None
) -> Any:
    """`attend` as Keras computes it."""
    return ops.dot_product_attention(query, key, value, mask=mask, scale=scale)
