"""A true run of two processes, each with half of the devices and of the batch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.backend_free


def start(*arguments):
    script = Path(__file__).with_name("two_processes.py")
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results_of(process):
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.split("RESULTS")[-1])


def weights_of(path):
    weights = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                weights.update({name: np.array(item)})
                if hasattr(item, "dtype")
                else None
            )
        )
    return weights


def test_two_processes_train_evaluate_and_save_what_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(number, port, tmp_path) for number in (0, 1)]
    (losses, figures), (others, other_figures) = map(results_of, processes)
    (first, expected), (second,) = losses, others
    assert [first, second] == pytest.approx([expected, expected], rel=1e-5)
    together, alone = figures
    assert [together] == other_figures
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(together) == 13
    actual, wanted = (weights_of(tmp_path / f"{n}.weights.h5") for n in ("two", "one"))
    assert actual.keys() == wanted.keys()
    assert len(actual) > 15
    for name, value in wanted.items():
        np.testing.assert_allclose(actual[name], value, atol=1e-5, err_msg=name)
