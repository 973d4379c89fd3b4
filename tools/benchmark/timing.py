"""Times of several functions interleaved in one run, on any backend.

Time on a shared machine drifts, so each round runs every candidate once, in a
shuffled order. A round's times belong together: ratios are taken within rounds, and
their median and quartiles say how sure a comparison is.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tools.benchmark.execution import wait

# Quartiles of fewer rounds say nothing, so a budget of seconds leaves as many.
LEAST_ROUNDS = 3


class PairedRatio(NamedTuple):
    """The ratio of two functions' times, taken in each round.

    Attributes:
        median: the median over the rounds.
        lower: the first quartile.
        upper: the third quartile.
    """

    median: float
    lower: float
    upper: float


def interleaved(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Times functions in turn."""
    times = interleaved_times(candidates, rounds, seed, on_round)
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_times(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
    warm_ups: int = 2,
    budget: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times functions in turn, and keeps the time of each round."""
    for function in candidates.values():
        for _ in range(warm_ups):
            wait(function())
    times = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(seed).shuffle
    begin = time.perf_counter()
    for number in range(rounds):
        spent = time.perf_counter() - begin
        if budget is not None and spent > budget and number >= LEAST_ROUNDS:
            break
        shuffle(order)
        for name in order:
            start = clock()
            wait(candidates[name]())
            times[name].append(clock() - start)
        on_round()
    return times


def paired_ratios(
    times: dict[str, Sequence[float]], baseline: str
) -> dict[str, PairedRatio]:
    """The ratios of functions' times to one of them, round by round.

    Whatever slows a whole round, such as another program, leaves its ratio alone.
    """
    if baseline not in times:
        raise ValueError(
            f"Expected baseline to be one of {list(times)}; received: {baseline!r}"
        )
    rounds = {name: len(values) for name, values in times.items()}
    if len(set(rounds.values())) > 1 or not rounds[baseline]:
        raise ValueError(
            "Expected as many rounds of each candidate, and one or more; "
            f"received: {rounds}"
        )
    return {
        name: _quartiles([x / y for x, y in zip(values, times[baseline])])
        for name, values in times.items()
    }


def _quartiles(values: Sequence[float]) -> PairedRatio:
    if len(values) == 1:
        return PairedRatio(*values * 3)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return PairedRatio(median, lower, upper)
