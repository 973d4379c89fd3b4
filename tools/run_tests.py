"""Runs the test suite on several backends and adds up the outcomes.

    python tools/run_tests.py [--backends jax tensorflow torch] [--fast] [-- ARGS]

A process can use one Keras backend only, so each backend gets its own pytests, two at a
time. PyTorch, which compiles least, runs every test (without it, the first backend
does); the others run the tests marked `every_backend`, and with `--fast` all of them
do. The last line has the form of pytest's closing line and counts all backends; the
exit status is 0 only if every backend passed.
"""

import argparse
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
        # The tests' small tensors cost PyTorch more in several threads than in one.
        "OMP_NUM_THREADS": "1",
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
    parser.add_argument(
        "--fast", action="store_true", help="run only the tests marked every_backend"
    )
    parser.add_argument("--jobs", type=int, default=2, help="pytests at a time")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST ARGS")
    args = parser.parse_args(argv)

    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as compiled,
        ThreadPoolExecutor(max(args.jobs, 1)) as pool,
    ):
        # The whole suite comes last, in parts: no process is idle at the end.
        whole = "torch" if "torch" in args.backends else args.backends[0]
        others = [backend for backend in args.backends if backend != whole]
        running = []
        for backend in (*others, whole):
            is_whole = backend == whole and not args.fast
            # Keras on TensorFlow keeps memory after each training: a third of the suite
            # takes more than 12 GB.
            parts = (12 if backend == "tensorflow" else 4) if is_whole else 1
            for part in range(1, parts + 1):
                pytest_args = [f"--part={part}/{parts}", *args.pytest_args]
                if not is_whole:
                    pytest_args.append("--fast")
                label = f"{backend} {part}/{parts}"
                running.append(
                    pool.submit(run_backend, backend, label, pytest_args, compiled)
                )
        finished = [future.result() for future in running]
    outcomes = [
        together(backend, [x for x in finished if x.backend == backend])
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
