"""A random choice of examples, of one pass over data whose length is not known."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_moe.checks import check_integer


class Reservoir:
    """Keeps examples such that each of those offered has the same chance.

    The choice depends on the seed and the order of the examples, and not on how they
    are batched.

    Args:
        size: largest number of examples that are kept.
        seed: seed of the choice.

    Reference:
        J. S. Vitter, *Random Sampling with a Reservoir* (1985), algorithm R.

    Example:

    >>> from keras_moe.analysis.report.reservoir import Reservoir
    >>> reservoir = Reservoir(2, seed=0)
    >>> reservoir.offer(3, "abc".__getitem__)
    >>> reservoir.offer(1, "d".__getitem__)
    >>> reservoir.seen, len(reservoir.kept)
    (4, 2)
    """

    def __init__(self, size: int, seed: int | None = 0):
        self.size, self.seen = check_integer("size", size), 0
        self._generator = np.random.default_rng(seed)
        self._slots: dict[int, tuple[int, Any]] = {}

    def offer(self, count: int, take: Callable[[int], Any]) -> None:
        """Offers the next examples.

        Args:
            count: number of examples.
            take: function from an example's place among them to what is kept of it,
                which must not be a view of more.
        """
        draws = self._generator.random(count)
        for place in range(count):
            slot = self.seen
            if slot >= self.size:
                slot = int(draws[place] * (self.seen + 1))
            if slot < self.size:
                self._slots[slot] = (self.seen, take(place))
            self.seen += 1

    @property
    def kept(self) -> dict[int, Any]:
        """The examples that are kept, by their numbers, in the order of the data."""
        return dict(sorted(self._slots.values(), key=lambda pair: pair[0]))
