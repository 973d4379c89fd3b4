"""One table of all claims about speed: ours, the limit, and the peers installed.

    python -m tools.benchmark
    python -m tools.benchmark --rows moe-layer router --backends jax torch
    python -m tools.benchmark --list
    python -m tools.benchmark --json > today.json
    python -m tools.benchmark --read today.json --markdown

Each row is measured in interleaved rounds: the ratio is the median of the rounds' own
ratios, with its quartiles. `!` marks a row during which other programs took more than a
twentieth of the machine's time. Each backend is a process of its own, and a row that
fails, or a peer that is not installed, is named in the table. `tools/benchmark/rows.py`
has the rows and their goals, `RESULTS.md` a dated table.
"""

import os
import sys
from pathlib import Path

# The benchmarks import each other as programs of one folder do.
sys.path.insert(0, str(Path(__file__).parent))

from row import BACKENDS, installed, select
from rows import ROWS

# Keras is imported below, if only to be told which backends are elsewhere.
os.environ.setdefault("KERAS_BACKEND", next(filter(installed, BACKENDS), "jax"))

import argparse
import math

from backends import measure_here, measure_in_child
from page import as_markdown, past_lines, show
from runner import Report, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "names of rows, or their beginnings; all rows by default"
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=names)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=[*filter(installed, BACKENDS)],
        help="backends, each in a process of its own; by default those installed",
    )
    budget = "seconds of a row's rounds, after which no further one begins"
    parser.add_argument("--seconds", type=float, default=20, help=budget)
    whole = "seconds of a backend after which no further row begins"
    parser.add_argument("--whole-seconds", type=float, default=math.inf, help=whole)
    parser.add_argument("--list", action="store_true", help="name the rows, and end")
    past = "files that --json wrote, to show in the place of measuring"
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help=past)
    parser.add_argument(
        "--markdown", action="store_true", help="print the table for a page"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def measure(args: argparse.Namespace, report: Report) -> None:
    rows = select(ROWS, args.rows)
    if args.list:
        columns = [
            {"row": row.name, "work": row.work, "backends": " ".join(row.backends)}
            for row in rows
        ]
        report.table("rows", columns, {})
        return
    if args.child:
        measure_here(rows, report, args.seconds, args.whole_seconds)
        return
    if args.read:
        lines = past_lines(args.read, rows)
    else:
        lines = [
            line
            for backend in args.backends
            for line in measure_in_child(
                backend, rows, args.seconds, report.console, args.whole_seconds
            )
        ]
    if args.markdown:
        sys.stdout.write(as_markdown(lines, rows))
    else:
        show(lines, report)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=0)
