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
from keras_moe.checks import argument_names

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
    assert {"convert", "describe"} < programs
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [getattr(node, "module", None)]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not programs.intersection(names), path


@pytest.fixture
def describe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "describe.py"))

    def run_tool(*arguments):
        status = tool["main"]([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_tool


@pytest.mark.backend_free
def test_describe_prints_what_the_function_says(describe):
    status, output, _ = describe(
        "vmoe_b32", "--num-classes", 10, "--json",
        "--set", "num_experts=4", "image_shape=[64,64,3]",
    )  # fmt: skip
    expected = models.describe(
        "vmoe_b32", num_classes=10, num_experts=4, image_shape=(64, 64, 3)
    )
    assert status == 0
    assert json.loads(output) == expected.to_dict()
    assert f"{models.describe('vmoe_b32').parameters:,}" in describe("vmoe_b32")[1]
    assert "vmoe_h14" in describe("--list")[1]


@pytest.mark.backend_free
def test_describe_suggests_arguments_alone(describe):
    backbone, task = models.ViTBackbone, models.ViTImageClassifier
    arguments = {*argument_names(backbone), *argument_names(task)} - {"backbone"}
    for given in ("nope=1", "compile=true", 'name="mine"', "backbone=3"):
        status, _, errors = describe("vmoe_b32", "--set", given)
        assert status == 1
        suggested = re.search(r"\((?:nearest|known): (.*)\)", errors).group(1)
        assert set(suggested.split(", ")) <= arguments


@pytest.mark.backend_free
def test_describe_explains_errors(describe):
    status, _, errors = describe("vmoe_b33")
    assert status == 1
    assert "nearest: vmoe_b32" in errors
    assert "NAME=VALUE" in describe("vit_b16", "--set", "x")[2]


@pytest.mark.backend_free
def test_the_table_of_the_zoo_is_true():
    zoo = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", zoo, re.M))
    assert set(rows) == set(models.list_presets())
    for name, row in rows.items():
        costs = models.describe(name)
        assert row == (
            f"{costs.parameters / 1e6:,.1f}M | {costs.active_parameters / 1e6:,.1f}M | "
            f"{costs.gflops:,.2f}"
        )


@pytest.mark.backend_free
def test_upcycle_makes_a_preset(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    main = runpy.run_path(str(ROOT / "tools" / "upcycle.py"))["main"]
    dense = models.from_preset("vmoe_digits", moe_layers=None, num_classes=10)
    dense.save_to_preset(tmp_path / "dense")
    source, output = str(tmp_path / "dense"), str(tmp_path / "sparse")
    assert main([source, output, "--num-experts", "4", "--moe-layers", "[3]"]) == 0
    sparse = models.from_preset(output)
    assert list(sparse.routing) == ["block_3"]
    levels = ["--router", "mumoe", "--num-experts", "[3, 2]", "--moe-layers", "[3]"]
    mumoe = str(tmp_path / "mumoe")
    assert main([source, mumoe, *levels]) == 0
    assert models.from_preset(mumoe).backbone.expert_kinds.ffn == 6
    clip_up = [source, str(tmp_path / "clip_up"), "--preset", "clip_up"]
    assert main([*clip_up, "--moe-layers", "[3]"]) == 0
    config = models.from_preset(clip_up[1]).backbone.get_config()
    assert config["auxiliary_losses"] == {"load_balance": 0.01, "z": 1e-4}
    assert config["router_options"] is None or not config["router_options"]
    report = json.loads((tmp_path / "sparse" / "upcycling.json").read_text())
    assert report["parameters"] == sparse.count_params()
    assert f"{sparse.count_params():,}" in capsys.readouterr().out
    # What fails leaves the older preset whole.
    assert main([source, output, "--set", "router=1"]) == 1
    assert "received: router=1" in capsys.readouterr().err
    assert list(models.from_preset(output).routing) == ["block_3"]

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setitem(main.__globals__, "write_json", full)
        assert main([source, output, "--num-experts", "2", "--moe-layers", "[3]"]) == 1
    assert "error: [Errno 28] No space" in capsys.readouterr().err
    again = json.loads((tmp_path / "sparse" / "upcycling.json").read_text())
    assert again == report
    assert models.from_preset(output).count_params() == sparse.count_params()
    # The source, by whatever path, is not overwritten.
    os.symlink(tmp_path / "dense", tmp_path / "link")
    before = {x.name: x.read_bytes() for x in (tmp_path / "dense").iterdir()}
    for same in (source, f"{source}/", str(tmp_path / "link")):
        assert main([source, same]) == 1
        assert "Expected another folder than the source" in capsys.readouterr().err
    assert before == {x.name: x.read_bytes() for x in (tmp_path / "dense").iterdir()}


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
