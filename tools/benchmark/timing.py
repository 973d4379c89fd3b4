"""Timing of several functions interleaved in one run, on any backend.

Time on a shared machine drifts, so each round runs every candidate once, in a
shuffled order, and figures are ratios of medians.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def interleaved(
    candidates: dict[str, Callable[[], Any]], rounds: int, seed: int = 0
) -> dict[str, float]:
    """The median seconds of each candidate, each run `rounds` times."""
    for function in candidates.values():  # compile and warm up
        for _ in range(2):
            wait(function())
    seconds = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(seed).shuffle
    with Progress(transient=True) as progress:
        task = progress.add_task("timing", total=rounds)
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                start = time.perf_counter()
                wait(candidates[name]())
                seconds[name].append(time.perf_counter() - start)
            progress.advance(task)
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait(result: Any) -> None:
    """Blocks until a result is computed."""
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready(result)
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def print_ratios(
    title: str, seconds: dict[str, float], baseline: str, flops: float | None = None
) -> None:
    """A table of medians, and of ratios to the candidate `baseline`.

    With `flops`, the useful operations of each, also how many were achieved.
    """
    table = Table(title=f"{title} ({keras.backend.backend()})")
    table.add_column("candidate")
    table.add_column("median ms", justify="right")
    table.add_column(f"over {baseline}", justify="right")
    if flops is not None:
        table.add_column("TFLOP/s", justify="right")
    for name, value in seconds.items():
        ratio = value / seconds[baseline]
        achieved = [] if flops is None else [f"{flops / value / 1e12:.2f}"]
        table.add_row(name, f"{1e3 * value:.1f}", f"{ratio:.3f}", *achieved)
    Console().print(table)
