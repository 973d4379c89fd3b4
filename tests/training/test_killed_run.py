"""A run that is killed ten times is the run that never was: bit for bit, on JAX."""

import json
import os
import subprocess
import sys
from pathlib import Path

from keras_moe import training

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_killed_at_random_moments_goes_on_bit_for_bit(tmp_path):
    script = Path(__file__).with_name("killed_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "10"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.split("RESULTS ")[1])
    # All over the run, and while checkpoints were being written.
    assert len(results["steps"]) == 10
    assert results["steps"][-1] > 40
    assert len(set(results["steps"])) > 5
    assert results["in a write"] > 0
    killed, uninterrupted = (
        training.find_checkpoint(tmp_path / name)
        for name in ("killed", "uninterrupted")
    )
    assert killed.step == uninterrupted.step == 140
    # History, random state, and the state of a callback; then all arrays.
    assert killed.state == uninterrupted.state
    assert killed.state["callbacks"] == {"Counts 1": {"steps": 140}}
    assert len(killed.state["history"]["val_loss"]) == 4
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (checkpoint.path / name for checkpoint in (killed, uninterrupted))
        assert a.read_bytes() == b.read_bytes()
    # Nothing half-written is left, and no more than is to be kept.
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        "step-00000136",
        "step-00000138",
        "step-00000140",
    }
