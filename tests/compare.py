"""Comparisons of arrays, tensors, and sequences of them."""

from typing import Any

import numpy as np
from keras import ops

to_numpy = ops.convert_to_numpy


def assert_close(actual: Any, expected: Any, rtol: float = 1e-7, atol: float = 0, **kw):
    """`np.testing.assert_allclose`, also of tensors; two sequences entry by entry."""
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, rtol, atol, **kw)
    else:
        actual, expected = _numpy(actual), _numpy(expected)
        np.testing.assert_allclose(actual, expected, rtol, atol, **kw)


def assert_same(actual: Any, expected: Any):
    """Like `assert_close`, of what is equal to the last bit."""
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(_numpy(actual), _numpy(expected))


def _numpy(x):
    if isinstance(x, list | tuple):
        return np.stack([_numpy(value) for value in x])
    return x if isinstance(x, np.ndarray) else to_numpy(x)
