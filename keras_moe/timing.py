"""Times of several functions interleaved in one run, on any backend.

Time on a shared machine drifts, so each round runs every candidate once, in a
shuffled order, and figures are ratios of medians.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from keras_moe.ops.kernels.execution import wait


def interleaved(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Times functions in turn.

    Args:
        candidates: functions by name, whose results may still be being computed.
        rounds: number of times that each is run, after two that compile and warm up.
        seed: seed of their order.
        on_round: function to call after each round.

    Returns:
        The median seconds of each candidate.

    Example:

    >>> from keras_moe.timing import interleaved
    >>> functions = {"short": lambda: sum(range(9)), "long": lambda: sum(range(99_999))}
    >>> seconds = interleaved(functions, rounds=3)
    >>> seconds["short"] < seconds["long"]
    True
    """
    for function in candidates.values():
        for _ in range(2):
            wait(function())
    seconds = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            wait(candidates[name]())
            seconds[name].append(time.perf_counter() - start)
        on_round()
    return {name: statistics.median(values) for name, values in seconds.items()}
