import json
import runpy
import sys
from types import SimpleNamespace

import keras
import pytest

from tests.forks import ROOT
from tools import run_tests

BENCHMARKS = ROOT / "tools" / "benchmark"


@pytest.mark.parametrize(("command", "columns"), [
    (
        "moe_layer --tokens 32 --dim 8 --mlp-dim 16 --experts 4 --selected 1 "
        "--routers softmax_token_choice",
        [{"candidate", "median ms", "over experts", "TFLOP/s"}],
    ),
    (
        "dropless --tables dropless moe++ --tokens 16 --dim 8 --mlp-dim 8 "
        "--experts 4",
        [{"over capacity"}] * 2 + [{"over vanilla"}] * 2,
    ),
    ("vmoe_step --preset vmoe_digits --batch-size 2", [{"over dense twin"}]),
    (
        "expert_ablation --preset vmoe_digits --experts 3 --classes 4 --images 6 "
        "--image-size 16 --rank 2",
        [{"experts", "per image", "all ablated, passes", "naive over it"}],
    ),
    (
        "mumoe_layer --parts layers entmax --images 1 --tokens 8 --dim 8 "
        "--experts 4 --entmax-experts 8",
        [{"over dense"}, {"MiB", "with outputs"}, {"over softmax"}],
    ),
    (
        "few_shot --examples 40 --tests 20 --dim 6 --classes 4 --numbers 1 30",
        [{"over big_vision's algorithm"}] * 2 + [{"l2", "largest difference"}],
    ),
])  # fmt: skip
def test_benchmarks_run(capsys, monkeypatch, command, columns):
    name, *arguments = command.split()
    path = BENCHMARKS / f"{name}.py"
    # Benchmarks set it, for the processes that they start, too.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments, "--rounds", "1", "--json"])
    runpy.run_path(str(path), run_name="__main__")
    output, errors = capsys.readouterr()
    document = json.loads(output)
    assert document["benchmark"] == name
    assert document["arguments"]["rounds"] == 1
    assert len(document["tables"]) == len(columns)
    for table, names in zip(document["tables"], columns):
        assert all(names <= set(row) for row in table["rows"])
        # People read the tables on stderr.
        assert table["title"].split()[0] in errors


def runs(*backends, lane="library", **options):
    options = {"fast": False, "jobs": 1, "pytest_args": []} | options
    return run_tests.runs(SimpleNamespace(backends=backends, lane=lane, **options))


def test_the_runner_runs_every_file_once():
    ((_, release),) = runs("jax", lane="release")
    assert all((ROOT / path).exists() for path in release)
    common = ["-x", *(f"--ignore={path}" for path in release)]
    jax, torch = runs("torch", "jax", jobs=2, pytest_args=["-x"])
    assert jax == ("jax", [*common, "--fast"])
    assert torch == ("torch", [*common, "--numprocesses=2", "--dist=loadfile"])
    assert runs("jax", pytest_args=["-x"]) == [("jax", common)]
    fast = runs("jax", fast=True, pytest_args=["-x"])
    assert fast == [("jax", [*common, "--fast"])]
    # TensorFlow runs the library in parts.
    files = {str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py")}
    parts = [x for _, names in runs("tensorflow") for x in names]
    library = [name for name in parts if name in files]
    assert sorted(library) == sorted(
        x for x in files if not x.startswith(tuple(release))
    )
