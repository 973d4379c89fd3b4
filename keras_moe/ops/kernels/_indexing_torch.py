"""Indexing on PyTorch where Keras's forms are in the way of a transformation.

`torch.export` fixes the number of groups: `take_along_dim` compares the shapes, and
`searchsorted` asks whether the size fits into an int32. `torch.func.vmap` cannot write
in place. They can go when Keras's can be transformed.
"""

import torch


def take_along_axis(x, indices, axis):
    """See `keras_moe.ops._primitives.take_along_axis`."""
    shape = list(x.shape)
    shape[axis] = indices.shape[axis]
    return torch.gather(x, axis, indices.long().expand(shape))


def scatter(x, places, values):
    """See `keras_moe.ops._primitives.scatter`."""
    return x.scatter(0, places.long(), values)


def searchsorted(edges, values):
    """See `keras_moe.ops._primitives.searchsorted`."""
    return torch.searchsorted(edges, values, out_int32=True)
