"""The table of all benchmarks: rows, noise, peers, processes and pages."""

import json
import runpy
import sys
from importlib import import_module

import keras
import pytest

from tests.forks import ROOT

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
        "name": "fake", "work": "sums", "source": "fake_benchmark:candidates",
        "arguments": {"count": 99_999}, "subject": "ours",
        "goals": {"limit": {"jax": 1e9, "torch": 0.5}, **dict.fromkeys(PEERS)},
        "peers": {name: name for name in PEERS}, "rounds": 4,
    }  # fmt: skip
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
    assert import_module("fake_benchmark").closed == [99_999]


@pytest.mark.parametrize(("share", "noisy"), [(0.0, False), (0.04, False), (0.5, True)])
def test_a_noisy_neighbour_is_marked(report, share, noisy):
    compare = import_module("comparison").compare
    page = import_module("page")
    line, *_ = compare(row(), "jax", report, "fake", read=reader(share))
    assert line["foreign"] == pytest.approx(share)
    assert page.is_noisy(line) is noisy
    assert (" ✓ ! |" in page.as_markdown([line], [row()])) is noisy


def test_a_failing_row_takes_no_other_with_it(report, capsys):
    backends = import_module("backends")
    rows = [row(source="fake_benchmark:broken", arguments={}), row(name="second")]
    backends.measure_here(rows, report, budget=0)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ready, first, second = (answer["lines"] for answer in answers)
    assert ready == []
    assert first[0]["note"] == "failed: ValueError: no such size"
    assert [line["row"] for line in second] == ["second"] * 4


def test_the_program_measures_a_row_in_a_child(folder, monkeypatch, capfd):
    backend = keras.backend.backend()
    arguments = ["--rows", "router-soft=", "--seconds", "0", "--json"]
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--backends", backend])
    runpy.run_path(str(BENCHMARKS), run_name="__main__")
    output, errors = capfd.readouterr()
    document = json.loads(output)
    (table,) = document["tables"]
    (line,) = table["rows"]
    assert (line["row"], line["backend"]) == ("router-soft", backend)
    assert line["over"] == "softmax_token_choice"
    assert line["ratio"] > 0
    assert line["rounds"] == 3
    assert "router-soft" in errors


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
