import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tools" / "benchmark"

pytestmark = pytest.mark.backend_free


def test_programs_take_nothing_from_each_other():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.glob("tools/**/*.py")}
    programs = {path.stem for path, tree in trees.items() if is_program(tree)}
    assert {"run_tests", "moe_layer"} < programs
    assert programs.isdisjoint({"runner", "gradients"})
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [getattr(node, "module", None)]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not programs.intersection(names), path


def is_program(tree):
    return any(
        isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        for node in tree.body
    )


def test_benchmarks_have_one_runner():
    """No benchmark reads a command line, times or prints by itself."""
    for path in BENCHMARKS.glob("*.py"):
        tree = ast.parse(path.read_text())
        if is_program(tree):
            called = {
                getattr(node.func, "attr", getattr(node.func, "id", None))
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
            }
            assert "run" in called, path
            own = {"ArgumentParser", "Console", "Table", "interleaved", "print"}
            assert called.isdisjoint(own), path


@pytest.mark.parametrize(
    ("name", "arguments", "columns"),
    [
        (
            "moe_layer",
            "--tokens 32 --dim 8 --mlp-dim 16 --experts 4 --selected 1 --rounds 1 "
            "--routers softmax_token_choice",
            [{"candidate", "median ms", "over experts", "TFLOP/s"}],
        ),
        (
            "dropless",
            "--tables dropless moe++ --tokens 16 --dim 8 --mlp-dim 8 --experts 4 "
            "--rounds 1",
            [{"over capacity"}] * 2 + [{"over vanilla"}] * 2,
        ),
        (
            "expert_ablation",
            "--preset vmoe_digits --experts 3 --classes 4 --images 6 --image-size 16 "
            "--rank 2 --rounds 1",
            [{"experts", "per image", "all ablated, passes", "naive over it"}],
        ),
        (
            "mumoe_layer",
            "--parts layers entmax --images 1 --tokens 8 --dim 8 --experts 4 "
            "--entmax-experts 8 --rounds 1",
            [{"over dense"}, {"MiB", "with outputs"}, {"over softmax"}],
        ),
        (
            "few_shot",
            "--examples 40 --tests 20 --dim 6 --classes 4 --numbers 1 30 --rounds 1",
            [
                {"candidate", "over big_vision's algorithm"},
                {"candidate", "over big_vision's algorithm"},
                {"l2", "best accuracy", "largest difference"},
            ],
        ),
        # The model is in a process of its own, on JAX.
        (
            "distribution",
            "--parts devices --devices 2 --processes 1 --steps 1 --blocks 2 --rounds 1",
            [{"devices", "over 2", "MiB per device", "on paper", "process GiB"}],
        ),
    ],
)
def test_benchmarks_run(capsys, monkeypatch, name, arguments, columns):
    path = BENCHMARKS / f"{name}.py"
    # Benchmarks set it, for the processes that they start, too.
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.split(), "--json"])
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


def run_alone(name, *arguments, **environment):
    """The output of a benchmark that sets its own backend."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_benchmark_of_the_compiler_runs():
    arguments = ["--tokens", "64", "--dim", "8", "--experts", "4"]
    assert "dropless" in run_alone("routing_memory", *arguments)


# In the place of the official model: one kernel, and the arguments that it was given.
OFFICIAL = """
from jax import numpy as jnp

class VisionTransformerMoe:
    def __init__(self, num_classes, encoder, **sizes):
        self.num_classes, self.moe = num_classes, encoder["moe"]

    def init(self, key, images):
        return {"kernel": jnp.zeros((images.shape[-1], self.num_classes))}

    def apply(self, weights, images, rngs=None):
        assert self.moe["layers"] == (1,) and self.moe["num_experts"] == 8
        logits = jnp.mean(images, axis=(1, 2)) @ weights["kernel"]
        return logits, {"auxiliary_loss": jnp.zeros(())}
"""


def test_whole_models_are_compiled_beside_the_official_one(tmp_path):
    package = tmp_path / "vmoe" / "nn"
    package.mkdir(parents=True)
    (package / "vit_moe.py").write_text(OFFICIAL)
    arguments = "--presets vmoe_digits --layers 2 --dispatchers einsum --json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    output = run_alone("compiled_cost", *arguments.split(), PYTHONPATH=path)
    (table,) = json.loads(output)["tables"]
    forward, official, gradients, _ = table["rows"]
    assert forward["model"] == gradients["model"] == "keras_moe"
    assert official["model"] == "vmoe, einsum"
    assert 0 < official["GFLOP"] < forward["GFLOP"] < gradients["GFLOP"]
    assert 0 < forward["temporary MiB"] < gradients["temporary MiB"]


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


def test_parts_of_the_suite_are_all_of_it():
    hook = runpy.run_path(str(ROOT / "tests" / "conftest.py"))[
        "pytest_collection_modifyitems"
    ]

    class Item(NamedTuple):
        path: str
        number: int
        free: bool
        originalname: str = "test"

        def get_closest_marker(self, name):
            return name == "backend_free" and self.free

        @property
        def nodeid(self):
            return f"{self.path}::{self.originalname}[{self.number}]"

    every = [Item(file, i, i == 0 or file == "c") for file in "abcd" for i in range(3)]

    def collected(part, skip, whole=True):
        options = {"--skip-backend-free": skip, "--part": part, "--whole": whole}
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
    assert set(collected((1, 1), True, whole=False)[0]) < set(whole)
    # No tests at all are an error, but not where another part has them.
    assert collected((5, 5), False) == ([], [True])
    every = []
    assert collected((1, 2), False) == ([], [False])


def test_files_that_run_once_are_imported_once(tmp_path):
    conftest = runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    path = tmp_path / "test_example.py"

    def answer(source, skip=True):
        path.write_text(source)
        options = {"--skip-backend-free": skip, "--part": (1, 1), "--whole": False}
        config = SimpleNamespace(
            getoption=options.get,
            stash={},
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        ignored = conftest["pytest_ignore_collect"](path, config)
        # No tests are an error, but not where another backend has them.
        conftest["pytest_collection_modifyitems"](config, [])
        assert config.stash[conftest["_NOTHING_LEFT"]] is bool(ignored)
        return ignored

    marked = "import pytest\n\npytestmark = pytest.mark.backend_free\n"
    assert answer(marked) is True
    assert answer(marked, skip=False) is None
    several = "pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures('a')]"
    assert answer(several) is True
    for others in (
        "@pytest.mark.backend_free\ndef test(): pass",
        "pytestmark = pytest.mark.usefixtures('op_by_op')",
        "# pytestmark = pytest.mark.backend_free",
    ):
        assert answer(others) is None


class Case(NamedTuple):
    """A test of the suite, with the argument that it is collected with."""

    path: str
    originalname: str
    number: int = 0
    mark: str = ""

    @property
    def nodeid(self):
        return f"{self.path}::{self.originalname}[{self.number}]"

    def get_closest_marker(self, name):
        return SimpleNamespace(args=("jax",)) if name == self.mark else None


def cases(name, count, mark=""):
    return [Case("a", name, number, mark) for number in range(count)]


def test_cases_are_dealt_to_the_backends_that_compile():
    dealt = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["_dealt"]
    alone = [case for number in range(100) for case in cases(f"alone_{number}", 1)]
    few, some, many = cases("few", 3), cases("some", 8), cases("many", 16)
    namesakes = [case._replace(path="b") for case in few]
    parity = cases("parity", 4, "every_backend") + cases("skipped", 9, "skipif")
    references = cases("references", 20, "every_backend")
    slow = cases("slow", 2, "dealt_to")
    every = [*alone, *few, *some, *many, *namesakes, *parity, *references, *slow]
    first, second = (dealt(every, name) for name in ("jax", "tensorflow"))
    # In the order of the suite, and what has to run everywhere twice.
    assert first == [x for x in every if x in first]
    assert {*first} & {*second} == {*parity}
    assert {*alone, *few, *namesakes, *references} <= {*first, *second}
    assert {*slow} <= {*first}
    assert {*slow}.isdisjoint(second)
    for backend in (first, second):
        numbers = [len({*x} & {*backend}) for x in (some, many, references)]
        assert numbers == [2, 2, 10]
        assert 30 < len({*alone} & {*backend}) < 70
        assert len({*few} & {*backend}) in (1, 2)
        assert len({*namesakes} & {*backend}) in (1, 2)
    # A new test moves no other.
    later = dealt(cases("new", 5) + every, "jax")
    assert [x for x in later if x.originalname != "new"] == first
