"""A run of two processes that is killed is the run that never was: bit for bit."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training

ROOT = Path(__file__).resolve().parents[2]
KILLS = 4

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.backend_free


def start(folder):
    """Both processes, which write to files what they have to say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("killed_processes.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    processes = []
    for number in (0, 1):
        with open(folder.parent / f"log-{number}.txt", "w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(number), str(port), str(folder)],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def logs(folder):
    return "\n".join((folder.parent / f"log-{n}.txt").read_text() for n in (0, 1))


def finish(folder):
    for process in start(folder):
        assert process.wait(timeout=600) == 0, logs(folder)[-6000:]
    assert logs(folder).count("DONE") == 2


def newest(folder):
    finished = [
        path for path in folder.glob("step-*") if (path / "manifest.json").exists()
    ]
    return max((int(path.name[5:]) for path in finished), default=0)


def is_writing(folder):
    return any(not (path / "manifest.json").exists() for path in folder.glob("step-*"))


def kill(folder, goal, in_a_write):
    """Kills both processes once the run has come so far."""
    processes = start(folder)
    end = time.monotonic() + 600
    try:
        while newest(folder) < goal or (in_a_write and not is_writing(folder)):
            assert time.monotonic() < end, logs(folder)[-6000:]
            ended = [process.poll() for process in processes]
            assert ended == [None, None], logs(folder)[-6000:]
            time.sleep(0.002)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def test_two_processes_that_are_killed_go_on_exactly(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole)
    draw = random.Random(0)
    cut, steps = 0, []
    for number in range(KILLS):
        goal = newest(killed) + draw.randrange(1, 6)
        codes = kill(killed, min(goal, 26), in_a_write=number % 2 == 0)
        assert codes == [-signal.SIGKILL] * 2
        cut += is_writing(killed)
        steps.append(newest(killed))
    finish(killed)
    assert cut > 0
    assert len(set(steps)) > 2
    ends = [training.find_checkpoint(folder) for folder in (whole, killed)]
    assert [type(x.storage).__name__ for x in ends] == ["OrbaxStorage"] * 2
    assert [x.step for x in ends] == [30, 30]
    assert ends[0].state == ends[1].state
    assert len(ends[0].state["history"]["val_loss"]) == 2
    # All arrays, in this process and on its backend.
    values = []
    for found in ends:
        groups = {
            group: [
                keras.Variable(np.zeros(x["shape"]), dtype=x["dtype"], trainable=False)
                for x in entries
            ]
            for group, entries in found.variables.items()
        }
        for entries, variables in zip(found.variables.values(), groups.values()):
            for entry, variable in zip(entries, variables):
                variable.path = entry["path"]
        training.restore_checkpoint(found, groups)
        values.append(
            [
                keras.ops.convert_to_numpy(variable.value)
                for variables in groups.values()
                for variable in variables
            ]
        )
    for a, b in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)
    # What the first process read, alone.
    for name in ("whole", "killed"):
        assert (tmp_path / f"{name}.weights.h5").stat().st_size > 1000
    # Nothing half-written is left, and no more than is to be kept.
    for folder in (whole, killed):
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000026", "step-00000028", "step-00000030"]
