"""Medians and ratios of interleaved times, with progress and as tables."""

from collections.abc import Callable
from typing import Any

import keras
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from keras_moe import timing


def interleaved(
    candidates: dict[str, Callable[[], Any]], rounds: int, seed: int = 0
) -> dict[str, float]:
    """The median seconds of each candidate, each run `rounds` times."""
    with Progress(transient=True) as progress:
        task = progress.add_task("timing", total=rounds)
        return timing.interleaved(
            candidates, rounds, seed, on_round=lambda: progress.advance(task)
        )


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
