"""A choice of examples, of one pass over data whose length is not known."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from keras_moe.analysis.report.section import Options
from keras_moe.checks import check_integer


class Reservoir:
    """Keeps examples such that each of those offered has the same chance.

    The choice depends on the seed and the order of the examples, and not on how they
    are batched.
    """

    def __init__(self, size: int, seed: int | None = 0):
        self.size, self.seen = check_integer("size", size), 0
        self._generator = np.random.default_rng(seed)
        self._slots: dict[int, tuple[int, Any]] = {}

    def offer(self, count: int, take: Callable[[int], Any]) -> None:
        """Offers the next examples."""
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


class Chosen:
    """Keeps examples of given numbers, as `Reservoir` keeps random ones."""

    def __init__(self, numbers: Iterable[int]):
        self.numbers, self.seen = sorted(numbers), 0
        self.kept: dict[int, Any] = {}

    def offer(self, count: int, take: Callable[[int], Any]) -> None:
        """Offers the next examples."""
        for number in self.numbers:
            if self.seen <= number < self.seen + count:
                self.kept[number] = take(number - self.seen)
        self.seen += count


def examples_to_show(options: Options) -> Reservoir | Chosen:
    """The examples that the options ask for, as one pass over data fills it."""
    if options.examples is not None:
        return Chosen(options.examples)
    return Reservoir(options.num_examples, options.seed)


def checked_numbers(examples: Any, count: int | None) -> tuple[int, ...] | None:
    """Numbers of examples, if they are different and there are so many examples."""
    if examples is None:
        return None
    if isinstance(examples, (str, bytes)) or not isinstance(examples, Iterable):
        raise ValueError(
            "Expected examples to be a sequence of numbers of examples; received: "
            f"examples={examples!r}"
        )
    numbers = tuple(check_integer("examples", number, 0) for number in examples)
    if not numbers or len({*numbers}) < len(numbers):
        raise ValueError(
            "Expected different numbers of examples, at least one; received: "
            f"examples={numbers}"
        )
    if count is not None and max(numbers) >= count:
        raise ValueError(
            f"Expected numbers of examples from 0 to {count - 1}, since the report "
            f"reads {count}; received: examples={numbers}"
        )
    return numbers
