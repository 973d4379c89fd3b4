"""Runs the test suite once per backend and adds up the outcomes.

    python tools/run_tests.py [--backends jax tensorflow torch] [--jobs 2] [--parts 2]
        [-- ARGS]

A process can use one Keras backend only, so every backend gets pytests of its own, two
at a time: most of the time goes into compiling, which takes one core. Each runs a part
of the files, PyTorch's first, which take longest, so that the cores are done at about
the same time; JAX's processes share the programs that they have compiled. PyTorch
compiles nothing and runs every test. The tests marked `backend_free` run nowhere else,
those marked `every_backend` on JAX and TensorFlow, too, and the others are dealt to
these two (see `_dealt` in `tests/conftest.py`); `-- --whole` deals nothing. The last
line has the form of pytest's closing line and counts every backend; the exit status is
0 only if every backend passed.

pytest-xdist would not take this over. It deals every test to one of its workers, or to
each of them, where this suite needs some tests on each backend, and the others on one
or two. With a call of xdist for each backend a core waits at the end of each of the
three; here a free core goes on with the next backend. A worker of xdist would
also run files of several parts after one another, and the processes of today are about
as long as JAX's compiler bears (see `forget_programs` in `tests/conftest.py`).
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("jax", "tensorflow", "torch")
# pytest's order in its closing line.
OUTCOMES = (
    "failed",
    "passed",
    "skipped",
    "deselected",
    "xfailed",
    "xpassed",
    "warnings",
    "errors",
)
CLOSING_LINE = re.compile(
    r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in [\d.]+s.*$"
)


class Outcome(NamedTuple):
    """The outcome of one backend's run of the suite."""

    backend: str
    returncode: int
    counts: Counter[str]
    seconds: float


def count_outcomes(closing_line: str) -> Counter[str] | None:
    """Returns the counts in pytest's closing line, None for any other line."""
    match = CLOSING_LINE.match(closing_line.strip())
    if not match:
        return None
    counts = Counter()
    for number, word in re.findall(r"(\d+) ([a-z]+)", match.group(1)):
        singular = {"warning": "warnings", "error": "errors"}
        counts[singular.get(word, word)] += int(number)
    return counts


def run_backend(
    backend: str, label: str, pytest_args: list[str], compiled: str
) -> Outcome:
    """Runs pytest with one backend, showing its output as it comes, by label.

    JAX keeps its compiled programs in the folder `compiled`: each file of tests begins
    with an empty memory, and compiles the same small programs again.
    """
    command = [sys.executable, "-m", "pytest", "--color=no", *pytest_args]
    environment = {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONUNBUFFERED": "1",
    }
    # The processes of the tests would compile the package's modules again and again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    counts = None
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            print(f"[{label}] {line}", end="", flush=True)
            counts = count_outcomes(line) or counts
    seconds = time.monotonic() - start
    counts = counts or Counter()
    # A backend that dies before pytest closes must not count as nothing wrong.
    if process.returncode and not counts["failed"] + counts["errors"]:
        counts["errors"] += 1
    return Outcome(backend, process.returncode, counts, seconds)


def together(backend: str, parts: list[Outcome]) -> Outcome:
    """Returns the outcome of all parts of one backend's run."""
    return Outcome(
        backend,
        next((part.returncode for part in parts if part.returncode), 0),
        sum((part.counts for part in parts), Counter()),
        sum(part.seconds for part in parts),
    )


def describe(counts: Counter[str]) -> str:
    """Returns counts in the words of pytest's closing line."""
    parts = []
    for outcome in OUTCOMES:
        if number := counts[outcome]:
            one = number == 1 and outcome in ("warnings", "errors")
            parts.append(f"{number} {outcome[:-1] if one else outcome}")
    return ", ".join(parts) or "no tests ran"


def closing_line(outcomes: list[Outcome], seconds: float) -> str:
    """Returns one line like pytest's own, for all backends together."""
    total = sum((outcome.counts for outcome in outcomes), Counter())
    # Deselected on one backend means that it ran on another.
    del total["deselected"]
    line = f"{describe(total)} in {seconds:.2f}s"
    if seconds >= 60:
        minutes, rest = divmod(int(seconds), 60)
        line += f" ({minutes // 60}:{minutes % 60:02d}:{rest:02d})"
    return line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--jobs", type=int, default=2, help="pytests at a time")
    parser.add_argument("--parts", type=int, default=2, help="pytests per backend")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST ARGS")
    args = parser.parse_args(argv)

    start = time.monotonic()
    count = max(args.parts, 1)
    parts = range(1, count + 1)
    with (
        tempfile.TemporaryDirectory() as compiled,
        ThreadPoolExecutor(max(args.jobs, 1)) as pool,
    ):
        # On PyTorch nothing is compiled: what need not run everywhere is fastest there.
        everything = "torch" if "torch" in args.backends else args.backends[0]
        # The longest come first, so that the cores are done at about the same time:
        # JAX's parts take longer than TensorFlow's.
        order = sorted(
            itertools.product(args.backends, parts),
            key=lambda part: part[0] != everything,
        )
        running = {}
        for backend, part in order:
            once = [] if backend == everything else ["--skip-backend-free"]
            pytest_args = [f"--part={part}/{count}", *once, *args.pytest_args]
            label = f"{backend} {part}/{count}"
            running[part, backend] = pool.submit(
                run_backend, backend, label, pytest_args, compiled
            )
        outcomes = [
            together(backend, [running[part, backend].result() for part in parts])
            for backend in args.backends
        ]

    print("\n===== all backends =====")
    for backend, returncode, counts, seconds in outcomes:
        verdict = f"FAILED (exit status {returncode})" if returncode else "ok"
        print(f"{backend:<12}{verdict:<26}{describe(counts)} in {seconds:.2f}s")
    print(closing_line(outcomes, time.monotonic() - start))
    return int(any(outcome.returncode for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
