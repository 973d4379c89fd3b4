"""Oversampling: examples of a small subpopulation, more than once."""

import numbers
from typing import Any

import numpy as np


def oversample(members: Any, count: int, seed: int = 0) -> np.ndarray:
    """Indices of all examples, among which a subpopulation has `count` places.

    The members' numbers of places differ by one at most.

    Args:
        members: boolean (N,), True for examples of the subpopulation.
        count: number of places of the subpopulation, such as the size of another one;
            not less than its number of members.
        seed: seed of the order, and of the members that get one place more.

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
    examples = np.flatnonzero(members)
    if not 0 < len(examples) <= count:
        raise ValueError(
            "Expected at least one member, and no more than count; received: "
            f"{len(examples)} members, count={count}"
        )
    generator = np.random.default_rng(seed)
    whole, rest = divmod(count, len(examples))
    places = [
        np.repeat(examples, whole),
        generator.choice(examples, rest, replace=False),
    ]
    indices = np.concatenate([np.flatnonzero(~members), *places])
    return generator.permutation(indices)
