"""Runs the test suite on several backends and adds up the outcomes.

    python tools/run_tests.py [--backends jax tensorflow torch] [--fast] [-- ARGS]

A process can use one Keras backend only, so each backend gets its own pytest. PyTorch,
which compiles least, runs every test (without it, the first backend does); the others
run the tests marked `every_backend`, and with `--fast` all of them do. The last line
has the form of pytest's closing line and counts all backends; the exit status is 0 only
if every backend passed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("jax", "tensorflow", "torch")
OUTCOMES = ("failed", "passed", "skipped", "errors")
# Seconds by backend and file.
DURATIONS = Path(sys.prefix) / "durations.json"
# What a release needs besides the library.
RELEASE = (
    "tests/cli/test_wheel.py",
    "tests/report/test_page.py",
    "tests/test_docs.py",
    "tests/test_guides.py",
    "tests/test_repository.py",
    "tests/test_site.py",
    "tests/test_types.py",
    "tests/tools",
    "tests/training/test_killed_runs.py",
)


class Outcome(NamedTuple):
    """What one pytest did: its exit status, and the seconds of each file."""

    backend: str
    status: int
    counts: Counter[str]
    seconds: Counter[str]


def read_report(path: str) -> tuple[Counter[str], Counter[str]]:
    """Returns the outcomes, and the seconds of each file, from a report of JUnit."""
    counts, seconds = Counter(), Counter()
    words = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    # A process that dies writes none.
    text = Path(path).read_text(encoding="utf-8") or "<testsuites />"
    for case in ElementTree.fromstring(text).iter("testcase"):
        outcomes = [words[part.tag] for part in case if part.tag in words]
        counts[outcomes[0] if outcomes else "passed"] += 1
        # A file that cannot be imported has its name for a test's.
        name = case.get("classname") or case.get("name")
        seconds[name.replace(".", "/") + ".py"] += float(case.get("time"))
    return counts, seconds


def run_pytest(backend: str, pytest_args: list[str], folder: str) -> Outcome:
    """Runs pytest with one backend, showing its output as it comes.

    JAX keeps its compiled programs in the folder: each file of tests begins with an
    empty memory, and compiles the same small programs again.
    """
    environment = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # The tests' small tensors cost PyTorch more in several threads than in one.
        "OMP_NUM_THREADS": "1",
        # glibc would give memory back and ask for it again in every step.
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**26),
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONUNBUFFERED": "1",
    }
    # The processes of the tests would compile the package's modules again and again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--color=no", *pytest_args]
        with subprocess.Popen(
            [*command, f"--junitxml={report.name}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout:
                print(f"[{backend}] {line}", end="", flush=True)
        counts, seconds = read_report(report.name)
    # Of `-k lint` a backend may have no tests.
    status = 0 if process.returncode == 5 else process.returncode
    # A backend that dies before pytest closes must not count as nothing wrong.
    if status and not counts["failed"] + counts["errors"]:
        counts["errors"] += 1
    return Outcome(backend, status, counts, seconds)


def runs(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Returns the backend and the arguments of each pytest; the last takes longest."""
    common = list(args.pytest_args)
    is_release = args.lane == "release"
    common += RELEASE if is_release else [f"--ignore={path}" for path in RELEASE]
    whole = "torch" if "torch" in args.backends else args.backends[0]
    others = [(x, [*common, "--fast"]) for x in args.backends if x != whole]
    if args.fast:
        common.append("--fast")
    elif whole == "tensorflow" and not is_release:
        # Keras on TensorFlow keeps memory after each training: a third of the suite
        # takes more than 12 GB.
        files = (path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py"))
        names = sorted(x for x in map(str, files) if not x.startswith(RELEASE))
        return others + [(whole, [*common, *names[part::12]]) for part in range(12)]
    if args.jobs > 1:
        # A file stays in one process, with its fixtures and compiled programs.
        common += [f"--numprocesses={args.jobs}", "--dist=loadfile"]
    return [*others, (whole, common)]


def describe(counts: Counter[str]) -> str:
    """Returns counts in the words of pytest's closing line."""
    parts = [f"{counts[x]} {x}" for x in OUTCOMES if counts[x]]
    return ", ".join(parts) or "no tests ran"


def closing_line(outcomes: list[Outcome], seconds: float) -> str:
    """Returns one line like pytest's own, for all backends together."""
    minutes, rest = divmod(int(seconds), 60)
    clock = f" ({minutes // 60}:{minutes % 60:02d}:{rest:02d})" if minutes else ""
    total = sum((outcome.counts for outcome in outcomes), Counter())
    return f"{describe(total)} in {seconds:.2f}s{clock}"


def keep_durations(outcomes: list[Outcome]) -> None:
    """Writes the seconds of each file, and prints the ten dearest."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    rows = [
        (round(seconds, 1), outcome.backend, name)
        for outcome in outcomes
        for name, seconds in outcome.seconds.items()
    ]
    for seconds, backend, name in rows:
        known.setdefault(backend, {})[name] = seconds
    DURATIONS.write_text(json.dumps(known, indent=1, sort_keys=True))
    for seconds, backend, name in sorted(rows, reverse=True)[:10]:
        print(f"{seconds:7.1f}s  {backend:<12}{name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument(
        "--fast", action="store_true", help="run only the tests marked every_backend"
    )
    parser.add_argument(
        "--lane",
        choices=("library", "release"),
        default="library",
        help="the library's tests, or those of guides, wheel and the like",
    )
    parser.add_argument("--jobs", type=int, default=2, help="pytests at a time")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST ARGS")
    args = parser.parse_args(argv)

    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max(args.jobs, 1)) as pool,
    ):
        running = [pool.submit(run_pytest, *run, folder) for run in runs(args)]
        outcomes = [future.result() for future in running]

    print("\n===== all backends =====")
    keep_durations(outcomes)
    for outcome in outcomes:
        verdict = f"FAILED (exit status {outcome.status})" if outcome.status else "ok"
        print(f"{outcome.backend:<12}{verdict:<26}{describe(outcome.counts)}")
    print(closing_line(outcomes, time.monotonic() - start))
    return int(any(outcome.status for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
