import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras
import pytest

from keras_moe import models

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", **environment},
        check=False,
    )


@pytest.mark.backend_free
def test_the_quickstart_refuses_no_epochs(tmp_path):
    result = run("tools/quickstart.py", "--epochs", 0, "--output", tmp_path / "run")
    assert result.returncode == 2
    assert "Expected --epochs of at least 1; received: 0" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_quickstart_runs_end_to_end(tmp_path):
    backend = keras.backend.backend()
    result = run(
        "tools/quickstart.py", "--epochs", 2, "--output", tmp_path,
        KERAS_BACKEND=backend,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "predictions are identical" in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["backend"] == backend
    # Two epochs only: far above chance, which is 0.1.
    assert results["test_accuracy"] > 0.3
    assert set(results["routing"]) == {"block_1", "block_3"}
    for statistics in results["routing"].values():
        assert abs(sum(statistics["expert_shares"]) - 1) < 1e-6
        assert 0 < statistics["dropped_choices"] < 0.5
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(
        models.from_preset(str(tmp_path / "preset")), models.ViTImageClassifier
    )


@pytest.mark.backend_free
def test_programs_take_nothing_from_each_other():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.glob("tools/**/*.py")}
    programs = {
        path.stem
        for path, tree in trees.items()
        if any(getattr(node, "name", None) == "main" for node in tree.body)
    }
    assert {"run_tests", "moe_layer"} < programs
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [getattr(node, "module", None)]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not programs.intersection(names), path


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (
            "moe_layer.py",
            "--tokens 32 --dim 8 --mlp-dim 16 --experts 4 --selected 1 --rounds 1 "
            "--routers softmax_token_choice",
        ),
        ("routing_memory.py", "--tokens 64 --dim 8 --experts 4"),
        (
            "expert_ablation.py",
            "--preset vmoe_digits --experts 3 --classes 4 --images 6 --image-size 16 "
            "--rank 2 --rounds 1",
        ),
        ("distribution.py", "--parts devices --devices 2 --processes 1 --steps 1"),
        (
            "mumoe_layer.py",
            "--parts layers entmax --images 1 --tokens 8 --dim 8 --experts 4 "
            "--entmax-experts 8 --rounds 1",
        ),
    ],
)
def test_benchmarks_run(script, arguments):
    result = run(f"tools/benchmark/{script}", *arguments.split())
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search("dropless|passes|entmax|on paper", result.stdout)


@pytest.mark.backend_free
def test_the_runner_adds_up_pytests_closing_lines():
    tool = runpy.run_path(str(ROOT / "tools" / "run_tests.py"))
    count, outcome, closing = (
        tool[name] for name in ("count_outcomes", "Outcome", "closing_line")
    )
    assert count("nothing of the kind") is None
    first = count("== 1 failed, 20 passed, 2 warnings in 3.20s ==")
    second = count("30 passed, 4 deselected in 61.00s (0:01:01)")
    assert first["failed"] == 1
    both = [outcome("jax", 1, first, 3.0), outcome("torch", 0, second, 62.0)]
    line = closing(both, 65.0)
    assert line == "1 failed, 50 passed, 2 warnings in 65.00s (0:01:05)"
    parts = [outcome("jax", status, first, 3.0) for status in (0, 2)]
    assert tool["together"]("jax", parts) == ("jax", 2, first + first, 6.0)


@pytest.mark.backend_free
def test_parts_of_the_suite_are_all_of_it():
    hook = runpy.run_path(str(ROOT / "tests" / "conftest.py"))[
        "pytest_collection_modifyitems"
    ]

    class Item(NamedTuple):
        path: str
        number: int
        free: bool

        def get_closest_marker(self, name):
            return name == "backend_free" and self.free

    every = [Item(file, i, i == 0 or file == "c") for file in "abcd" for i in range(3)]

    def collected(part, skip):
        options = {"--skip-backend-free": skip, "--part": part}
        deselected = []
        config = SimpleNamespace(
            getoption=options.get,
            stash={},
            hook=SimpleNamespace(
                pytest_deselected=lambda items: deselected.extend(items)
            ),
        )
        items = list(every)
        hook(config, items)
        assert sorted(items + deselected) == every
        return items, [*config.stash.values()]

    for skip in (False, True):
        whole, _ = collected((1, 1), skip)
        assert whole == [item for item in every if not (skip and item.free)]
        parts = [collected((number, 2), skip)[0] for number in (1, 2)]
        assert {item.path for item in parts[0]}.isdisjoint(x.path for x in parts[1])
        assert sorted(parts[0] + parts[1]) == whole
    # No tests at all are an error, but not where another part has them.
    assert collected((5, 5), False) == ([], [True])
    every = []
    assert collected((1, 2), False) == ([], [False])
