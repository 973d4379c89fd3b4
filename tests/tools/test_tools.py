import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras
import pytest

from tests.forks import run_python

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tools" / "benchmark"


@pytest.mark.parametrize(
    ("command", "columns"),
    [
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
        (
            "vmoe_step --preset vmoe_digits --batch-size 2 --dtype mixed_bfloat16 "
            "--chip h200 --forms V-MoE dropless einsum",
            [{"over einsum"}, {"tokens/s", "TFLOP/s", "% of peak"}],
        ),
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
    ],
)
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


# Stands in for the official model.
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
    program = BENCHMARKS / "compiled_cost.py"
    done = run_python(program, *arguments.split(), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = json.loads(done.stdout)["tables"]
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


class Case(NamedTuple):
    """A collected test; `marks` are the names of its markers."""

    number: int
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name):
        return name in self.marks


def test_parts_of_the_suite_are_all_of_it():
    conftest = runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))

    def config(fast, part):
        options = {"--fast": fast, "--part": part}
        return SimpleNamespace(getoption=options.get, hook=hook)

    def imported(fast, part):
        ignored = conftest["pytest_ignore_collect"]
        return [path for path in files if not ignored(path, config(fast, part))]

    assert imported(False, (1, 1)) == files
    assert Path(__file__) in files
    for fast in (False, True):
        first, second = (imported(fast, (number, 2)) for number in (1, 2))
        assert {*first}.isdisjoint(second)
        assert sorted(first + second) == imported(fast, (1, 1))
        assert len(first) - len(second) in (0, 1)
    every = [Case(0, ("every_backend",)), Case(1), Case(2, ("every_backend",))]
    for fast in (False, True):
        items, deselected = list(every), []
        conftest["pytest_collection_modifyitems"](items=items, config=config(fast, 1))
        assert items == [case for case in every if case.marks or not fast]
        assert sorted(items + deselected) == every
