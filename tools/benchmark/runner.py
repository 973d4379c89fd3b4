"""The runner of all benchmarks: arguments, interleaved times, tables and JSON.

A benchmark is a function of its arguments and a `Report`, which times candidates in
turn, so that a machine whose speed drifts slows all of them, and shows medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from keras_moe._files import json_text
from tools.benchmark import timing


class Report:
    """The tables of a benchmark, printed as they come, or in the end as JSON.

    Args:
        rounds: number of times that each candidate runs.
        as_json: whether stdout is left to JSON, and people read stderr.
    """

    def __init__(self, rounds: int, as_json: bool = False):
        self.rounds = rounds
        self.tables = []
        self.console = Console(stderr=as_json)
        if not self.console.is_terminal:
            # A file has no width, and rich would cut its columns at 80.
            self.console.width = max(self.console.width, 120)

    def seconds(
        self, candidates: dict[Any, Callable[[], Any]], rounds: int | None = None
    ) -> dict[Any, float]:
        """The median seconds of functions that run in turn, with a bar.

        Args:
            candidates: functions by name.
            rounds: number of times that each runs; None for the report's.
        """
        times = self.times(candidates, rounds or self.rounds)
        return {name: statistics.median(values) for name, values in times.items()}

    def times(
        self,
        candidates: dict[Any, Callable[[], Any]],
        rounds: int,
        label: str = "timing",
        **options: Any,
    ) -> dict[Any, list[float]]:
        """The seconds of functions that run in turn, round by round, with a bar.

        Args:
            candidates: functions by name.
            rounds: number of times that each runs.
            label: text of the bar.
            **options: further arguments of `tools.benchmark.timing.interleaved_times`.
        """
        console = self.console
        with Progress(
            console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task(label, total=rounds)
            return timing.interleaved_times(
                candidates, rounds, on_round=lambda: progress.advance(task), **options
            )

    def compare(
        self,
        title: str,
        candidates: dict[str, Callable[[], Any]],
        baseline: str,
        clock: Callable[[], float] = time.perf_counter,
        **amounts: float,
    ) -> dict[str, float]:
        """Times functions, and adds a table of them over one of them.

        Ratios are medians over the rounds of each round's own ratio, between quartiles.

        Args:
            title: title of the table.
            candidates: functions by name.
            baseline: name of the candidate over which the others are shown.
            clock: clock that they are timed by.
            **amounts: work of a candidate by its unit, shown by second.

        Returns:
            The median seconds of each candidate.
        """
        times = self.times(candidates, self.rounds, clock=clock)
        seconds = {name: statistics.median(values) for name, values in times.items()}
        ratios = timing.paired_ratios(times, baseline)
        rows = [
            {
                "candidate": name,
                "median ms": 1e3 * value,
                f"over {baseline}": ratios[name].median,
                "lower quartile": ratios[name].lower,
                "upper quartile": ratios[name].upper,
                **{f"{unit}/s": amount / value for unit, amount in amounts.items()},
            }
            for name, value in seconds.items()
        ]
        formats = {"median ms": ".1f", f"over {baseline}": ".3f"}
        formats |= {"lower quartile": ".3f", "upper quartile": ".3f"}
        self.table(title, rows, formats | {f"{unit}/s": ".4g" for unit in amounts})
        return seconds

    def table(
        self, title: str, rows: Sequence[dict[str, Any]], formats: dict[str, str]
    ) -> None:
        """Adds a table, and prints it for people.

        Args:
            title: title of the table; the backend is added.
            rows: values by column, the same columns in each.
            formats: format of a column's values; without one they are texts.
        """
        self.tables.append({"title": title, "rows": list(rows)})
        self.show(f"{title} ({keras.backend.backend()})", rows, formats)

    def show(
        self, title: str, rows: Sequence[dict[str, Any]], formats: dict[str, str]
    ) -> None:
        """Prints a table for people, and adds none.

        Args:
            title: title of the table.
            rows: values by column, the same columns in each.
            formats: format of a column's values; without one they are texts.
        """
        table = Table(title=title)
        for column, value in rows[0].items():
            justify = "left" if isinstance(value, str) else "right"
            table.add_column(column, justify=justify, no_wrap=column == "row")
        for row in rows:
            table.add_row(*(f"{row[name]:{formats.get(name, '')}}" for name in row))
        self.console.print(table)


def rows_of_process(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The rows of the first table of this benchmark, run in a process of its own.

    Args:
        *arguments: arguments of the command line.
        **environment: environment variables of the process, beside those of this one.

    Raises:
        SystemExit: with what it printed, if it fails.
    """
    done = subprocess.run(
        [sys.executable, sys.argv[0], *arguments, "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["tables"][0]["rows"]


def run(
    description: str,
    measure: Callable[[argparse.Namespace, Report], None],
    add_arguments: Callable[[argparse.ArgumentParser], None],
    rounds: int = 9,
) -> None:
    """Runs a benchmark as a program.

    Args:
        description: text for `--help`.
        measure: function that adds tables to the report.
        add_arguments: function that adds the benchmark's own arguments.
        rounds: default of `--rounds`; 0 for a benchmark that times nothing.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    if rounds:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="times that each candidate runs"
        )
    parser.add_argument(
        "--json", action="store_true", help="print JSON in the place of tables"
    )
    args = parser.parse_args()
    report = Report(getattr(args, "rounds", 0), args.json)
    measure(args, report)
    if args.json:
        arguments = {
            name: value for name, value in vars(args).items() if name != "json"
        }
        document = {
            "benchmark": Path(sys.argv[0]).stem,
            "backend": keras.backend.backend(),
            "arguments": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in arguments.items()
            },
            "tables": report.tables,
        }
        print(json_text(document))
