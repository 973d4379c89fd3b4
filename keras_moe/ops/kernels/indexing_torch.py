"""Indexing on PyTorch that `torch.export` traces for any number of groups.

Keras's forms fix it: `take_along_dim` compares the shapes, and `searchsorted` asks
whether the size fits into an int32. They can go when Keras's can be traced.
"""

import torch


def take_along_axis(x, indices, axis):
    """See `keras_moe.ops.primitives.take_along_axis`."""
    shape = list(x.shape)
    shape[axis] = indices.shape[axis]
    return torch.gather(x, axis, indices.long().expand(shape))


def searchsorted(edges, values):
    """See `keras_moe.ops.primitives.searchsorted`."""
    return torch.searchsorted(edges, values, out_int32=True)
