"""The measurement of a row: a line for each candidate that ours is compared with."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from neighbours import CpuTimes, cpu_seconds, foreign_share, read_cpu_times
from row import MISSING, Row
from runner import Report

from tools.benchmark.timing import paired_ratios

CLOCKS = {"wall": (time.perf_counter, "ms"), "cpu": (cpu_seconds, "CPU ms")}

# Columns of a line that are None where there are no figures.
FIGURES = (
    "value",
    "other",
    "ratio",
    "quartiles",
    "rounds",
    "goal",
    "met",
    "foreign",
)


def compare(
    row: Row,
    backend: str,
    report: Report,
    label: str,
    budget: float | None = None,
    read: Callable[[], CpuTimes] = read_cpu_times,
) -> list[dict[str, Any]]:
    """Measures a row on this process's backend.

    Args:
        row: the row.
        backend: name of the backend.
        report: the runner's report, which times and shows progress.
        label: text of the bar.
        budget: seconds after which no further round begins.
        read: reader of the clocks of this process and of the machine.

    Returns:
        Lines of the table: values by column, the same columns in each.
    """
    with report.console.status(label):
        made = row.function()(**row.arguments)
    made = contextlib.nullcontext(made) if isinstance(made, dict) else made
    with made as candidates:
        names = [name for name in (row.subject, *row.goals) if name in candidates]
        candidates = {name: candidates[name] for name in names}
        if row.unit:
            values, times, foreign = candidates, None, None
        else:
            # Compiled before the clocks are read: a compiler's time is no row's.
            report.times(candidates, 1, label=f"{label}, compiling", warm_ups=1)
            before = read()
            clock, _ = CLOCKS[row.clock]
            options = {"warm_ups": 0, "budget": budget, "clock": clock}
            times = report.times(candidates, row.rounds, label=label, **options)
            foreign = foreign_share(before, read())
            values = {
                name: 1e3 * statistics.median(seconds)
                for name, seconds in times.items()
            }
    lines = []
    for name in row.goals:
        if name not in values:
            # A peer that nobody asked for has no part on this backend.
            if row.peers.get(name) in MISSING:
                lines.append(blank(row, backend, name, MISSING[row.peers[name]]))
            continue
        if times is None:
            ratio = lower = upper = values[row.subject] / values[name]
        else:
            ratio, lower, upper = paired_ratios(times, name)[row.subject]
        goal = row.goal(name, backend)
        lines.append(
            blank(row, backend, name)
            | {
                "value": values[row.subject],
                "other": values[name],
                "ratio": ratio,
                "quartiles": [lower, upper],
                "rounds": len(times[name]) if times else 1,
                "goal": goal,
                "met": None if goal is None else ratio <= goal,
                "foreign": foreign,
            }
        )
    return lines


def blank(row: Row, backend: str, over: str, note: str | None = None) -> dict[str, Any]:
    """A line without figures.

    Args:
        row: the row.
        backend: name of the backend.
        over: name of the candidate that ours is compared with.
        note: reason why there are none.
    """
    return {
        "row": row.name,
        "backend": backend,
        "subject": row.subject,
        "over": over,
        "unit": row.unit or CLOCKS[row.clock][1],
        **dict.fromkeys(FIGURES),
        "note": note,
    }
