"""The arithmetic of training as a command."""

import runpy
from pathlib import Path

import pytest

from keras_moe import distribution

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.backend_free


@pytest.fixture
def plan(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "plan.py"))

    def run_tool(*arguments):
        status = tool["main"]([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_tool


HUGE = ("--preset", "vmoe_h14", "--devices", 256, "--batch-size", 4096)


def test_a_layout(plan):
    status, output, _ = plan(
        *HUGE, "--expert-parallel", 32, "--optimizer", "adafactor", "--num-classes", 9,
        "--utilization", 0.5, "--set", "rematerialize=true",
    )  # fmt: skip
    expected = distribution.costs(
        "vmoe_h14", 256, 4096, "tpu_v4", 32, 1, "adafactor", utilization=0.5,
        num_classes=9, rematerialize=True,
    )  # fmt: skip
    assert status == 0
    assert f"{expected.memory_bytes / 2**30:.2f}" in output
    assert f"{expected.traffic['all-to-all (tokens)'] / 1e9:,.3f} GB" in output
    assert "(fits)" in output
    assert "50% of peak" in output


def test_layouts_are_compared(plan):
    status, output, _ = plan(*HUGE)
    assert status == 0
    rows = output.split("memory of a device")[0]
    for parallel in (1, 2, 4, 8, 16, 32):
        found = distribution.costs("vmoe_h14", 256, 4096, expert_parallel=parallel)
        assert f"{found.memory_bytes / 2**30:.1f}" in rows
    assert "experts over 32" in output


def test_what_does_not_fit_is_explained(plan):
    status, _, errors = plan(*HUGE, "--expert-parallel", "batch")
    assert status == 1
    assert "expert_parallel=256, num_experts=32" in errors
    assert "NAME=VALUE" in plan(*HUGE, "--set", "x")[2]
    dense = ("--preset", "vit_b16", "--devices", 6, "--batch-size", 12)
    assert "experts over 1, heads over 2" in plan(*dense, "--model-parallel", 2)[1]
