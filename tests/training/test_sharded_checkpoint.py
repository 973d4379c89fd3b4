"""Two processes write a checkpoint together, each its own pieces."""

import socket
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from tests.forks import run_script

pytest.importorskip("orbax.checkpoint")


def test_two_processes_write_a_checkpoint_that_any_layout_reads(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_checkpoint.py")
    run_script(script, port, tmp_path)
    split = [int((tmp_path / f"split-{number}").read_text()) for number in (0, 1)]
    # Attention's four kernels and three biases, and the experts' four.
    assert split == [11, 11]
    # This process has one device, and another backend.
    checkpoint = training.find_checkpoint(tmp_path / "several")
    with np.load(tmp_path / "expected.npz", allow_pickle=False) as stored:
        expected = list(stored.values())
    made = {
        group: [
            keras.Variable(np.zeros(x.shape), dtype=x.dtype, trainable=False)
            for x in described
        ]
        for group, described in checkpoint.variables.items()
    }
    checkpoint.restore(made)
    for variable, value in zip(
        [*made["model"], *made["optimizer"]], expected, strict=True
    ):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable.value), value, err_msg=variable.path
        )
    # Both have written.
    names = {path.name for path in checkpoint.path.rglob("ocdbt.process_*")}
    assert names == {"ocdbt.process_0", "ocdbt.process_1"}
