"""Standardisation, whose gradient keeps its outputs and no inputs."""

from typing import Any

from keras import ops

from keras_moe.ops.own_gradient import with_own_gradient


def standardize(
    x: Any, axes: tuple[int, ...], epsilon: float, mask: Any = None
) -> tuple[Any, Any, Any]:
    """Values less their mean, over their standard deviation."""

    def forward(x, *mask):
        mean = _mean(x, axes, *mask)
        # Squares of centred values: no difference of large numbers.
        centred = x - mean
        variance = _mean(centred * centred, axes, *mask)
        y = centred * ops.rsqrt(variance + epsilon)
        return (y, mean, variance), (y, variance, *mask)

    def backward(kept, upstream, mean_upstream, variance_upstream):
        y, variance, *mask = kept
        scale = ops.rsqrt(variance + epsilon)
        # Rows without a part in the statistics depend on them all the same.
        total = ops.sum(upstream, axes, keepdims=True) - mean_upstream / scale
        along = ops.sum(upstream * y, axes, keepdims=True)
        along = along - 2.0 * variance_upstream / (scale * scale)
        count = _count(y, axes, *mask)
        change = total / count + y * (along / count)
        if mask:
            change = ops.where(mask[0] > 0, change, ops.zeros_like(change))
        return scale * (upstream - change), *(None for _ in mask)

    x = ops.convert_to_tensor(x)
    if mask is None:
        return with_own_gradient(forward, backward, x)
    mask = ops.expand_dims(ops.cast(mask, x.dtype), -1)
    return with_own_gradient(forward, backward, x, mask)


def _mean(x, axes, mask=None):
    if mask is None:
        return ops.mean(x, axes, keepdims=True)
    # A product would not do: padding may hold NaN.
    total = ops.sum(ops.where(mask > 0, x, ops.zeros_like(x)), axes, keepdims=True)
    return total / _count(x, axes, mask)


def _count(x, axes, mask=None):
    if mask is not None:
        return ops.maximum(ops.sum(mask, axes, keepdims=True), 1.0)
    size = 1
    for axis in axes:
        size = size * ops.shape(x)[axis]
    return ops.maximum(ops.cast(size, x.dtype), 1.0)
