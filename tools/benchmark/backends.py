"""The rows of the table on one backend: in this process, or in a child.

A child writes a line of JSON for each row as it ends, so that a row that kills its
process takes no other with it: the rows after it get a new child.
"""

import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
from comparison import blank, compare
from rich.console import Console
from row import Row, installed
from runner import Report

MARK = '{"lines": '
ROOT = Path(__file__).resolve().parents[2]


def measure_here(
    rows: list[Row], report: Report, budget: float, whole: float = math.inf
) -> None:
    """Measures rows on this process's backend, and writes their lines as they come.

    Args:
        rows: the rows.
        report: the runner's report, whose console is not stdout.
        budget: seconds of a row's rounds.
        whole: seconds after which no further row begins.
    """
    backend = keras.backend.backend()
    write_lines([])
    begin = time.monotonic()
    for number, row in enumerate(rows, 1):
        label = f"{backend} {number}/{len(rows)} {row.name}"
        if time.monotonic() - begin > whole:
            write_lines([blank(row, backend, "", "not measured: no time was left")])
            continue
        try:
            lines = compare(row, backend, report, label, budget)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            lines = [blank(row, backend, "", f"failed: {reason}")]
        write_lines(lines)
        forget()


def measure_in_child(
    backend: str,
    rows: list[Row],
    budget: float,
    console: Console,
    whole: float = math.inf,
) -> list[dict[str, Any]]:
    """Measures rows on a backend in a process of its own.

    Args:
        backend: name of the backend.
        rows: rows, of which those are measured that the backend has.
        budget: seconds of a row's rounds.
        console: the console on which a child that ends early is named.
        whole: seconds of a child after which no further row begins.

    Returns:
        The lines of the table.
    """
    left = [row for row in rows if backend in row.backends]
    if not installed(backend):
        return [blank(row, backend, "", f"{backend} is not installed") for row in left]
    lines = []
    while left:
        answers, status = _answers_of_child(backend, left, budget, whole)
        # The first answer comes before the first row.
        for row_lines in answers[1:]:
            lines += row_lines
            left = left[1:]
        if not left:
            break
        reason = f"failed: the process ended with status {status}"
        lost, left = (left[:1], left[1:]) if answers else (left, [])
        console.print(f"{backend}, {lost[0].name} {reason}")
        lines += [blank(row, backend, "", reason) for row in lost]
    return lines


def _answers_of_child(backend, rows, budget, whole):
    """The lines of each row that a child came to, and its exit status."""
    command = ["-m", "tools.benchmark", "--child", "--json"]
    command += ["--seconds", str(budget), "--whole-seconds", str(whole)]
    command += ["--rows", *(f"{row.name}=" for row in rows)]
    *answers, status = child_answers(command, backend)
    return answers, status


def child_answers(
    command: list[str],
    backend: str,
    seconds: Callable[[], float] | None = None,
    **environment: str,
) -> Iterator[Any]:
    """What a child writes, as it comes: lines of the table; at the end its status.

    Args:
        command: arguments of Python.
        backend: the child's backend.
        seconds: gives the longest wait for an answer, after which the child is killed.
        **environment: further environment variables.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    environment = {**quiet, **os.environ, **environment, "KERAS_BACKEND": backend}
    with subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        watch = _watch(child, seconds)
        try:
            for line in child.stdout or ():
                # Libraries print to stdout, too.
                if line.startswith(MARK):
                    watch.cancel()
                    yield json.loads(line)["lines"]
                    watch = _watch(child, seconds)
        except BaseException:
            child.kill()
            raise
        finally:
            watch.cancel()
    yield child.returncode


def _watch(child, seconds):
    """A timer that kills a child, begun; without seconds it never does."""
    timer = threading.Timer(seconds() if seconds else 0, child.kill)
    timer.daemon = True
    if seconds:
        timer.start()
    return timer


def write_lines(lines: list[dict[str, Any]]) -> None:
    """Answers the parent."""
    sys.stdout.write(json.dumps({"lines": lines}) + "\n")
    sys.stdout.flush()


def forget() -> None:
    """Lets go of a row's models and programs, which the next one would pay for."""
    keras.utils.clear_session()
    gc.collect()
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    elif keras.backend.backend() == "torch":
        import torch

        torch.cuda.empty_cache()
