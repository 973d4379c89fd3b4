"""The benchmark of one GPU, whole, at sizes for a CPU."""

import json
import os
import sys
from importlib import import_module

import keras
import numpy as np
import pytest

from tests.forks import ROOT

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.skipif(BACKEND == "tensorflow", reason="has no rows")


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", BACKEND)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(ROOT / "tools" / "benchmark")


@pytest.fixture
def gpu():
    return import_module("gpu")


def line(gpu, row, backend, **figures):
    row = next(x for x in gpu.ROWS if x.name == row)
    return gpu._line(row, backend, **figures)


def names(gpu, results, backends=("jax", "torch"), rows=None):
    missing = gpu.missing(results, backends, rows)
    return [(backend, row.name) for backend, part in missing for row in part]


def test_every_row_runs_and_the_table_has_it(gpu, tmp_path, capsys):
    rows = [row for row in gpu.ROWS if BACKEND in row.backends]
    # Sizes are those of the rows before.
    rows = [row for row in rows if not row.name.startswith("vmoe_l16")]
    gpu.measure([row.name for row in rows], 0.0, "h200", small=True)
    output = capsys.readouterr().out.splitlines()
    (machine,), *found = (
        json.loads(x)["lines"] for x in output if x.startswith('{"lines"')
    )
    assert (machine["device"], machine["small"]) == ("cpu", True)
    assert [lines[0]["row"] for lines in found] == [row.name for row in rows]
    results = gpu.Results(tmp_path / "gpu.json")
    results.add_machine(BACKEND, machine)
    for lines in found:
        results.add(lines)
        for x in lines:
            assert x["note"] is None or x["note"].startswith("not installed"), x
            # Within float32 and bfloat16, and nothing crosses from image to image.
            assert x.get("met", True), x
            if x["form"] == "among other neighbours":
                assert x["bits"] == 0, x
            if x.get("share_of_peak"):
                flops = x["tflops_per_s"] * 1e12
                assert x["share_of_peak"] == pytest.approx(flops / 989.5e12)
                # A multiplication and an addition of each weight of the patches.
                assert flops / x["tokens_per_s"] > 3 * 2 * 16 * 16 * 3 * 32 * 4 / 5
    forms = [x["form"] for lines in found for x in lines]
    assert forms.count("grouped_mlp") == 2
    table = results.path.with_suffix(".md").read_text().splitlines()
    assert sum(x.count("no bit differs") for x in table) >= 4
    assert sum(x.startswith("| ") for x in table) == 2 + len(forms)
    again = gpu.Results(results.path)
    assert again.markdown() == results.markdown()
    left = [name for _, name in names(gpu, again, [BACKEND])]
    done = {x["row"] for lines in found for x in lines if x["note"] is None}
    assert set(left) == {x.name for x in gpu.ROWS if BACKEND in x.backends} - done


def test_a_row_without_memory_ends_its_process(gpu, monkeypatch, capsys):
    def fails(*_, form, **__):
        text = {"ours": "no such size", "ours, dropless": "CUDA out of memory: 9 GiB"}
        raise RuntimeError(text[form])

    monkeypatch.setattr(import_module("gpu_work"), "step", fails)
    rows = ["vmoe_b16: ours", "vmoe_b16: ours, dropless", "vit_b16: ours"]
    gpu.measure(rows, 0.0, None, small=True)
    _, *found = (json.loads(x)["lines"] for x in capsys.readouterr().out.splitlines())
    notes = [x["note"] for lines in found for x in lines]
    assert notes == ["failed: RuntimeError: no such size", "out of memory"]


def test_what_is_missing_comes_by_importance(gpu, tmp_path):
    results = gpu.Results(tmp_path / "gpu.json")
    everything = names(gpu, results)
    assert everything[:4] == [
        ("jax", "kernels: float32"),
        ("jax", "kernels: bfloat16"),
        ("torch", "kernels: float32"),
        ("torch", "kernels: bfloat16"),
    ]
    assert ("jax", "vit_b16: timm") not in everything
    results.add([line(gpu, "kernels: float32", "jax", note="took longer")])
    results.add([line(gpu, "kernels: bfloat16", "jax", note="out of memory")])
    measured = {"ms": 1.0, "share_of_peak": None}
    results.add([line(gpu, "vmoe_b16: ours", "torch", **measured)])
    # From the file, as a second start sees them.
    left = names(gpu, gpu.Results(results.path))
    gone = {("jax", "kernels: bfloat16"), ("torch", "vmoe_b16: ours")}
    assert set(left) == set(everything) - gone
    assert left[-1] == ("jax", "kernels: float32")
    assert names(gpu, results, ["jax"], ["vit"]) == [("jax", "vit_b16: ours")]


def test_another_machine_has_another_file(gpu, tmp_path):
    results = gpu.Results(tmp_path / "gpu.json")
    results.add_machine("jax", {"device": "NVIDIA H200", "small": False})
    with pytest.raises(SystemExit, match="another --output"):
        results.add_machine("jax", {"device": "cpu", "small": True})


def test_a_wrong_kernel_and_a_bit_are_seen(monkeypatch):
    work = import_module("gpu_work")
    monkeypatch.setattr(
        work.grouped, "grouped_matmul", lambda x, y, _: work._by_masks(x, y, [12] * 4)
    )
    found = {x["form"]: x["met"] for x in work.kernels("float32", small=True)}
    assert not found["grouped_matmul"]
    assert found["grouped_mlp"]
    x = np.array([1.0, 2.0, -0.0], "float32")
    y = np.array([np.nextafter(np.float32(1), np.float32(2)), 2.0, 0.0], "float32")
    found = work.differing_bits(x, y)
    assert found == {"bits": 2, "values": 2, "of": 3, "largest": 2.0**-23}


def test_a_child_that_is_silent_is_killed():
    answers = import_module("backends").child_answers
    code = "print('{\"lines\": [1]}', flush=True)\nimport time\ntime.sleep(60)"
    waits = iter([30.0, 0.1])
    found = list(answers(["-c", code], BACKEND, lambda: next(waits)))
    assert found == [[1], -9]
    code = "print('noise'); print('{\"lines\": []}'); raise SystemExit(3)"
    assert list(answers(["-c", code], BACKEND)) == [[], 3]
    assert sys.modules["backends"].ROOT == ROOT
