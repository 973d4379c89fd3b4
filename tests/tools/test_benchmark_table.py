"""The table of all benchmarks: rows, noise, peers, processes and pages."""

import json
import multiprocessing
import runpy
import sys
import time
from importlib import import_module
from pathlib import Path

import keras
import pytest

from tests.forks import run_python

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tools" / "benchmark"

SOURCE = """
import contextlib

from row import peer

closed = []

@contextlib.contextmanager
def candidates(count):
    made = {"ours": lambda: sum(range(count)), "limit": lambda: sum(range(9))}
    for name in ("json", "a_module_that_nobody_has", "a_module_that_breaks"):
        if peer(name):
            made[name] = lambda: None
    yield made
    closed.append(count)

def bytes_kept():
    return {"ours": 30, "limit": 20}

def broken():
    raise ValueError("no such size\\nand more")
"""


# The last is another backend's, and its function does not ask for it.
PEERS = ("json", "a_module_that_nobody_has", "a_module_that_breaks", "another")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The benchmarks' folder, and a folder with a module of fake candidates."""
    (tmp_path / "fake_benchmark.py").write_text(SOURCE)
    breaks = "raise RuntimeError('no such operator\\nand more')"
    (tmp_path / "a_module_that_breaks.py").write_text(breaks)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    sys.modules.pop("fake_benchmark", None)


@pytest.fixture
def report(folder):
    return import_module("runner").Report(rounds=3, as_json=True)


def row(**changes):
    fields = {
        "name": "fake",
        "work": "sums",
        "source": "fake_benchmark:candidates",
        "arguments": {"count": 99_999},
        "subject": "ours",
        "goals": {"limit": {"jax": 1e9, "torch": 0.5}, **dict.fromkeys(PEERS)},
        "peers": {name: name for name in PEERS},
        "rounds": 4,
    }
    return import_module("row").Row(**fields | changes)


def reader(*shares, cores=2):
    """Clocks by which others take shares of the machine, one for each ten seconds."""
    times = import_module("neighbours").CpuTimes
    readings = [times(100.0, 50.0, 0.0, cores)]
    for share in shares:
        busy, own, wall, _ = readings[-1]
        busy += 5.0 + 10.0 * cores * share
        readings.append(times(busy, own + 5.0, wall + 10.0, cores))
    return iter(readings).__next__


@pytest.mark.parametrize(("backend", "met"), [("jax", True), ("torch", False)])
def test_a_row_has_a_line_for_each_candidate(report, backend, met):
    compare = import_module("comparison").compare
    lines = compare(row(), backend, report, "fake", read=reader(0.02))
    limit, here, away, broken = lines
    assert [line["over"] for line in lines] == ["limit", *PEERS[:3]]
    assert {line["row"] for line in lines} == {"fake"}
    lower, upper = limit["quartiles"]
    assert 1 < lower <= limit["ratio"] <= upper
    assert limit["value"] > limit["other"] > 0
    assert (limit["unit"], limit["rounds"]) == ("ms", 4)
    assert limit["met"] is met
    assert limit["foreign"] == pytest.approx(0.02)
    assert here["goal"] is here["met"] is None
    assert away["note"] == "a_module_that_nobody_has is not installed"
    assert broken["note"] == "a_module_that_breaks does not import: no such operator"
    assert away["ratio"] is broken["ratio"] is None
    assert all(limit.keys() == line.keys() for line in lines)
    assert import_module("fake_benchmark").closed == [99_999]


def test_a_row_of_numbers_is_not_timed(report):
    compare = import_module("comparison").compare
    source = {"source": "fake_benchmark:bytes_kept", "arguments": {}}
    numbers = row(**source, goals={"limit": 1.5}, unit="MiB")
    (line,) = compare(numbers, "jax", report, "fake", read=None)
    assert (line["ratio"], line["met"], line["unit"]) == (1.5, True, "MiB")
    assert line["foreign"] is None


def test_a_row_of_work_is_timed_by_its_own_clock(report, monkeypatch):
    comparison = import_module("comparison")
    ticks = iter(range(1_000_000))
    clock = ticks.__next__
    monkeypatch.setitem(comparison.CLOCKS, "cpu", (clock, "CPU ms"))
    limit, *_ = comparison.compare(
        row(clock="cpu"), "jax", report, "fake", read=reader(0.02)
    )
    # Two readings of the clock for each run, whatever time it takes.
    assert (limit["value"], limit["ratio"], limit["unit"]) == (1e3, 1.0, "CPU ms")


def test_work_of_workers_counts(folder):
    cpu_seconds = import_module("neighbours").cpu_seconds
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    worker = context.Process(target=ends.wait)
    before, deadline = cpu_seconds(), time.monotonic() + 30
    worker.start()
    # A worker that starts takes processor time, while this process sleeps.
    while cpu_seconds() - before < 0.01 and time.monotonic() < deadline:
        time.sleep(0.05)
    running = cpu_seconds()
    ends.set()
    worker.join()
    assert running - before >= 0.01
    assert cpu_seconds() >= running - 0.02


@pytest.mark.parametrize(("share", "noisy"), [(0.0, False), (0.04, False), (0.5, True)])
def test_a_noisy_neighbour_is_marked(report, share, noisy):
    compare = import_module("comparison").compare
    page = import_module("page")
    line, *_ = compare(row(), "jax", report, "fake", read=reader(share))
    assert line["foreign"] == pytest.approx(share)
    assert page.is_noisy(line) is noisy
    assert (" ✓ ! |" in page.as_markdown([line], [row()])) is noisy
    page.show([line], report)
    assert report.tables[-1]["rows"] == [line]


def test_clocks_of_this_machine(folder, tmp_path):
    neighbours = import_module("neighbours")
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest, in hundredths of a second.
    stat.write_text("cpu  100 10 50 900 70 1 2 37 5 0\ncpu0 1 2\ncpu1 1 2\nintr 9\n")
    before = neighbours.read_cpu_times(stat)
    assert (before.busy, before.cores) == (pytest.approx(2.0), 2)
    stat.unlink()
    after = neighbours.read_cpu_times(stat)
    assert after.busy is None
    assert neighbours.foreign_share(before, after) is None
    assert after.own >= before.own
    # Clocks that tick apart make no share below nothing.
    later = before._replace(own=before.own + 1, wall=before.wall + 1)
    assert neighbours.foreign_share(before, later) == 0.0


def test_names_of_rows(folder):
    select = import_module("row").select
    rows = (row(name="router"), row(name="router-soft"), row(name="fit"))

    def names(*asked):
        return [row.name for row in select(rows, asked and list(asked))]

    assert names("fit", "router") == ["router", "router-soft", "fit"]
    assert names("router=") == ["router"]
    with pytest.raises(SystemExit, match="router, router-soft, fit; received: 'soft'"):
        names("router", "soft")


def test_a_failing_row_takes_no_other_with_it(report, capsys):
    backends = import_module("backends")
    rows = [row(source="fake_benchmark:broken", arguments={}), row(name="second")]
    backends.measure_here(rows, report, budget=0)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ready, first, second = (answer["lines"] for answer in answers)
    assert ready == []
    assert first[0]["note"] == "failed: ValueError: no such size"
    assert [line["row"] for line in second] == ["second"] * 4
    assert second[0]["rounds"] == 3
    backends.measure_here(rows, report, budget=0, whole=-1)
    _, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    notes = {answer["lines"][0]["note"] for answer in answers}
    assert notes == {"not measured: no time was left"}


def test_a_row_that_kills_its_process_is_named(report, monkeypatch):
    backends = import_module("backends")
    rows = [row(name=name) for name in "abcd"] + [row(name="e", backends=("jax",))]
    starts = []

    def answers(backend, left, budget, whole):
        """The second row of a process kills it, but a lone one."""
        starts.append([row.name for row in left])
        done = [[backends.blank(left[0], backend, "limit")]]
        return [[], *done], 0 if len(left) == 1 else -9

    monkeypatch.setattr(backends, "_answers_of_child", answers)
    lines = backends.measure_in_child("torch", rows, 0, report.console)
    assert starts == [["a", "b", "c", "d"], ["c", "d"]]
    notes = {line["row"]: line["note"] for line in lines}
    failed = "failed: the process ended with status -9"
    assert notes == {"a": None, "b": failed, "c": None, "d": failed}
    # A process that never starts has no row to blame.
    monkeypatch.setattr(backends, "_answers_of_child", lambda *_: ([], 1))
    lines = backends.measure_in_child("torch", rows, 0, report.console)
    assert [line["note"] for line in lines] == [failed.replace("-9", "1")] * 4


def test_the_program_measures_a_row_in_a_child():
    backend = keras.backend.backend()
    arguments = ["--rows", "router-soft=", "--seconds", "0", "--json"]
    done = run_python("-m", "tools.benchmark", *arguments, "--backends", backend)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    (table,) = document["tables"]
    (line,) = table["rows"]
    assert (line["row"], line["backend"]) == ("router-soft", backend)
    assert line["over"] == "softmax_token_choice"
    assert line["ratio"] > 0
    assert line["rounds"] == 3
    assert "router-soft" in done.stderr


def test_past_tables_are_one_page(folder, tmp_path, monkeypatch, capsys):
    rows = import_module("rows").ROWS
    blank = import_module("comparison").blank
    first, second = rows[:2]
    paths = []
    for index, ratio in enumerate((1.5, 1.25)):
        line = blank(first, "jax", next(iter(first.goals)))
        figures = {"value": 1.0, "other": 0.5, "ratio": ratio, "quartiles": [1, 2]}
        line |= figures | {"rounds": 3, "goal": 1.3, "met": ratio < 1.3}
        paths.append(tmp_path / f"{index}.json")
        other = [blank(second, "torch", next(iter(second.goals)), "failed")]
        document = {"tables": [{"rows": [line, *(other if index == 0 else [])]}]}
        paths[-1].write_text(json.dumps(document))
    monkeypatch.syspath_prepend(ROOT)
    arguments = ["benchmark", "--read", *map(str, paths), "--markdown"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(BENCHMARKS), run_name="__main__")
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("| JAX | TensorFlow | PyTorch | goal |")
    assert len(lines) == 2
    # The later file counts, and a row that failed is named.
    assert lines[0].startswith(f"| `{first.name}` ")
    assert "| 1.25 (1.00-2.00), 1 ms ✓ |" in lines[0]
    assert "| failed |" in lines[1]


def test_rows_are_consistent_and_have_results(folder):
    rows = import_module("rows").ROWS
    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        module, _, function = row.source.partition(":")
        source = (BENCHMARKS / f"{module}.py").read_text()
        assert f"def {function}(" in source, row.name
        assert row.goals, row.name
        assert row.peers.keys() <= row.goals.keys(), row.name
        assert f"`{row.name}`" in results
        for goal in row.goals.values():
            assert not isinstance(goal, dict) or set(goal) <= set(row.backends)
