"""Oversampling: examples of a small subpopulation, more than once."""

import numbers
from typing import Any

import numpy as np


def oversample(members: Any, count: int, seed: int = 0) -> np.ndarray:
    """Indices of all examples, in which a subpopulation has `count` places.

    Each member has as many places as the others, but for one.

    Args:
        members: boolean (N,), which examples belong to the subpopulation.
        count: how many places it gets, such as the size of another subpopulation; as
            many as it has members at least.
        seed: of the order, and of which members get one place more.

    Returns:
        int (N - members + count,), shuffled: `images[indices], labels[indices]` is the
        training data.

    Raises:
        ValueError: if there are no members, or more than `count`.

    Reference:
        *Multilinear Mixture of Experts*, appendix J.

    Example:

    >>> import numpy as np
    >>> from keras_moe.data import oversample
    >>> indices = oversample([True, False, False, False], count=3)
    >>> np.bincount(indices).tolist()
    [3, 1, 1, 1]
    """
    members = np.asarray(members)
    if members.ndim != 1 or members.dtype != bool:
        raise ValueError(
            "Expected booleans, one for each example; received: "
            f"shape={members.shape}, dtype={members.dtype}"
        )
    if not isinstance(count, numbers.Integral):
        raise ValueError(f"Expected count to be an integer; received: count={count!r}")
    found = np.flatnonzero(members)
    if not 0 < len(found) <= count:
        raise ValueError(
            "Expected at least one member, and no more than count; received: "
            f"{len(found)} members, count={count}"
        )
    generator = np.random.default_rng(seed)
    whole, rest = divmod(count, len(found))
    places = [np.repeat(found, whole), generator.choice(found, rest, replace=False)]
    indices = np.concatenate([np.flatnonzero(~members), *places])
    return generator.permutation(indices)
