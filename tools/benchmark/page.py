"""The table of all rows: for a terminal, and for a page of the documentation."""

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neighbours import NOISY
from row import BACKENDS, Row
from runner import Report

TITLES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

COLUMNS = ("ours, theirs", "ratio", "quartiles", "goal", "noise")


def show(lines: Sequence[dict[str, Any]], report: Report) -> None:
    """Adds the table to a report, and prints it for people.

    Args:
        lines: lines of the table, as `comparison.compare` returns them.
        report: the runner's report.
    """
    title = f"{datetime.date.today()}, {os.cpu_count()} cores"
    report.tables.append({"title": title, "rows": list(lines)})
    report.show(title, [_shown(line) for line in lines], {})


def past_lines(paths: Sequence[Path], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Lines that `--json` wrote, in the order of the rows.

    Args:
        paths: files; where two have a row on the same backend, the later one counts.
        rows: rows to keep.
    """
    kept = {}
    for path in paths:
        lines = json.loads(path.read_text(encoding="utf-8"))["tables"][0]["rows"]
        by_key = {}
        for line in lines:
            by_key.setdefault((line["row"], line["backend"]), []).append(line)
        kept |= by_key
    return [
        line
        for row in rows
        for backend in BACKENDS
        for line in kept.get((row.name, backend), [])
    ]


def as_markdown(lines: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """The table of a page: a line for each comparison, a column for each backend.

    Args:
        lines: lines of the table.
        rows: rows, in their order; those without any line are left out.
    """
    head = ["row", "work, and over whose time", *TITLES.values(), "goal"]
    table = [head, ["---"] * len(head)]
    for row in rows:
        # The work once, however many candidates there are.
        work = f"{row.work}; over "
        for over in row.goals:
            cells = {
                line["backend"]: _cell(line)
                for line in lines
                if (line["row"], line["over"]) == (row.name, over)
            }
            if cells:
                columns = [cells.get(backend, "") for backend in TITLES]
                table.append(
                    [f"`{row.name}`", f"{work}{over}", *columns, _goal(row, over)]
                )
                work = "over "
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def is_noisy(line: dict[str, Any]) -> bool:
    """Whether other programs took much of the machine while a line was measured."""
    return line["foreign"] is not None and line["foreign"] > NOISY


def _shown(line):
    shown = {name: line[name] for name in ("row", "backend", "over")}
    if line["ratio"] is None:
        return shown | dict.fromkeys(COLUMNS, "") | {"ours, theirs": line["note"]}
    goal = ""
    if line["goal"] is not None:
        goal = f"{line['goal']:.2f} {'met' if line['met'] else 'not met'}"
    values = (
        f"{_number(line['value'])}, {_number(line['other'])} {line['unit']}",
        f"{line['ratio']:.3f}",
        "{:.3f}-{:.3f}".format(*line["quartiles"]),
        goal,
        f"! {line['foreign']:.0%}" if is_noisy(line) else "",
    )
    return shown | dict(zip(COLUMNS, values))


def _cell(line):
    if line["ratio"] is None:
        return line["note"]
    cell = f"{line['ratio']:.2f}"
    if line["rounds"] > 1:
        cell += " ({:.2f}-{:.2f})".format(*line["quartiles"])
    cell = f"{cell}, {_number(line['value'])} {line['unit']}"
    if line["met"] is not None:
        cell += " ✓" if line["met"] else " ✗"
    return cell + " !" * is_noisy(line)


def _number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _goal(row, over):
    goal = row.goals[over]
    if isinstance(goal, dict):
        return ", ".join(f"{TITLES[name]} {value}" for name, value in goal.items())
    return "" if goal is None else str(round(goal, 2))
