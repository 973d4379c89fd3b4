"""Sums and means over the tokens and groups that count, which the losses share.

Axes: G groups, S group_size.
"""

from typing import Any

from keras import ops


def token_sum(values: Any, mask: Any = None) -> Any:
    """Sums (G, S, X) over the tokens that count: (G, X)."""
    if mask is not None:
        values = ops.where(ops.expand_dims(mask, -1), values, 0.0)
    return ops.sum(values, axis=1)


def token_mean(values: Any, mask: Any = None) -> Any:
    """The mean of (G, S, X) over the tokens that count: (G, X), 0 without any."""
    if mask is None:
        return ops.mean(values, axis=1)
    count = ops.sum(ops.cast(mask, "float32"), axis=1, keepdims=True)
    return token_sum(values, mask) / ops.maximum(count, 1.0)


def over_counted_groups(losses: Any, counted: Any) -> Any:
    """Losses (G,) whose mean is that of the groups that count, boolean (G,).

    The losses of other groups are 0, and all losses if no group counts.
    """
    counted = ops.cast(counted, "float32")
    share = ops.mean(counted)
    return losses * counted / ops.where(share > 0, share, 1.0)
