"""A run of two processes that are killed is the run that never was: bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training.checkpoint_files import is_orbax

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("orbax.checkpoint")


def arrays_of(checkpoint):
    """All arrays, in this process and on its backend."""
    groups = {
        group: [
            keras.Variable(np.zeros(x.shape), dtype=x.dtype, trainable=False)
            for x in entries
        ]
        for group, entries in checkpoint.variables.items()
    }
    checkpoint.restore(groups)
    return [
        keras.ops.convert_to_numpy(variable.value)
        for variables in groups.values()
        for variable in variables
    ]


def test_two_processes_that_are_killed_go_on_exactly(tmp_path):
    script = Path(__file__).with_name("killed_processes.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.split("RESULTS ")[1])
    first, *killed, last = results["lives"]
    assert first == last == [0, 0], done.stderr[-4000:]
    assert killed == [[-signal.SIGKILL] * 2] * 2, done.stderr[-4000:]
    # In the middle of a checkpoint.
    newest = [names[-1:] for names in results["finished"]]
    assert newest == [[], ["step-00000004"]]
    ends = [training.find_checkpoint(tmp_path / name) for name in ("whole", "killed")]
    assert all(map(is_orbax, (x.path for x in ends)))
    assert [x.step for x in ends] == [6, 6]
    # History and random state, then all arrays.
    assert ends[0].state == ends[1].state
    assert len(ends[0].state["history"]["val_loss"]) == 2
    for a, b in zip(*map(arrays_of, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    # Nothing half-written is left, and no more than is to be kept.
    for name in ("whole", "killed"):
        steps = sorted(path.name for path in (tmp_path / name).iterdir())
        assert steps == ["step-00000004", "step-00000005", "step-00000006"]
