"""Runs of several processes, and killed ones, which end like one that never was."""

import json
import signal
from itertools import chain
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training._checkpoint_files import is_orbax
from tests.compare import assert_same
from tests.forks import run_python


def results_of(script, *arguments):
    """What a program of this folder reports, and what it printed on errors."""
    done = run_python(Path(__file__).with_name(script), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split("RESULTS ")[1]), done.stderr[-4000:]


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(tmp_path):
    # It also finds that programs are compiled once, and kept for later lives.
    results, _ = results_of("killed_run.py", tmp_path)
    # In two writes, while it starts, and between two checkpoints.
    assert results["steps"] == [10, 10, 28, 44]
    half_written = [[".step-00000012"], [], [".step-00000030"], []]
    assert results["half-written"] == half_written
    killed, uninterrupted = (
        training.find_checkpoint(tmp_path / name)
        for name in ("killed", "uninterrupted")
    )
    assert killed.step == uninterrupted.step == 60
    # History, random state, and the state of a callback; then all arrays.
    assert killed.state == uninterrupted.state
    assert killed.state["callbacks"] == {"Counts 1": {"steps": 60}}
    assert len(killed.state["history"]["val_loss"]) == 3
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (checkpoint.path / name for checkpoint in (killed, uninterrupted))
        assert a.read_bytes() == b.read_bytes()
    # Nothing half-written is left, and no more than is to be kept.
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == [f"step-000000{step}" for step in (56, 58, 60)]


def arrays_of(checkpoint):
    """All arrays, in this process and on its backend."""

    def variable(x):
        return keras.Variable(np.zeros(x.shape), dtype=x.dtype, trainable=False)

    groups = {name: [*map(variable, x)] for name, x in checkpoint.variables.items()}
    checkpoint.restore(groups)
    return [keras.ops.convert_to_numpy(x.value) for x in chain(*groups.values())]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The folder, the results and the errors of all that two processes do."""
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path_factory.mktemp("processes")
    return folder, *results_of("killed_processes.py", folder)


def test_two_processes_that_are_killed_go_on_exactly(processes):
    folder, results, errors = processes
    first, *killed, last = results["lives"]
    assert first == last == [0, 0], errors
    assert killed == [[-signal.SIGKILL] * 2] * 2, errors
    # In the middle of a checkpoint.
    newest = [names[-1:] for names in results["finished"]]
    assert newest == [[], ["step-00000004"]]
    ends = [training.find_checkpoint(folder / name) for name in ("whole", "killed")]
    assert all(map(is_orbax, (x.path for x in ends)))
    assert [x.step for x in ends] == [6, 6]
    # History and random state, then all arrays.
    assert ends[0].state == ends[1].state
    assert len(ends[0].state["history"]["val_loss"]) == 2
    for a, b in zip(*map(arrays_of, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    # Nothing half-written is left, and no more than is to be kept.
    for name in ("whole", "killed"):
        steps = sorted(path.name for path in (folder / name).iterdir())
        assert steps == ["step-00000004", "step-00000005", "step-00000006"]


def test_two_processes_write_a_checkpoint_that_any_layout_reads(processes):
    folder, results, errors = processes
    assert results["sharded"] == [0, 0], errors
    split = [int((folder / f"split-{number}").read_text()) for number in (0, 1)]
    # Attention's four kernels and three biases, and the experts' four.
    assert split == [11, 11]
    # This process has one device, and another backend.
    checkpoint = training.find_checkpoint(folder / "several")
    with np.load(folder / "expected.npz", allow_pickle=False) as stored:
        expected = list(stored.values())
    assert_same(arrays_of(checkpoint), expected)
    # Both have written.
    names = {path.name for path in checkpoint.path.rglob("ocdbt.process_*")}
    assert names == {"ocdbt.process_0", "ocdbt.process_1"}
