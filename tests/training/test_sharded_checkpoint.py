"""Two processes write a checkpoint together, each its own pieces."""

import json
import re
import socket
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training.array_pieces import opened_pieces
from tests.forks import run_script

pytestmark = pytest.mark.backend_free


STORAGES = ("LocalStorage", "OrbaxStorage")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's checkpoint in each storage, written by the same two processes."""
    folder = tmp_path_factory.mktemp("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_checkpoint.py")
    run_script(script, port, folder, *STORAGES)
    split = [int((folder / f"split-{number}").read_text()) for number in (0, 1)]
    # Attention's four kernels and three biases, and the experts' four.
    assert split == [11, 11]
    return folder


@pytest.mark.parametrize("storage", STORAGES)
def test_two_processes_write_a_checkpoint_that_any_layout_reads(folder, storage):
    # This process has one device, and another backend.
    checkpoint = training.find_checkpoint(folder / storage)
    with np.load(folder / "expected.npz", allow_pickle=False) as stored:
        expected = list(stored.values())
    made = {
        group: [
            keras.Variable(np.zeros(x["shape"]), dtype=x["dtype"], trainable=False)
            for x in described
        ]
        for group, described in checkpoint.variables.items()
    }
    training.restore_checkpoint(checkpoint, made)
    for variable, value in zip(
        [*made["model"], *made["optimizer"]], expected, strict=True
    ):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable.value), value, err_msg=variable.path
        )

    assert type(checkpoint.storage).__name__ == storage
    if storage == "OrbaxStorage":
        owners = {re.search(r"process_\d", name) for name in checkpoint.files}
        assert {x[0] for x in owners if x} == {"process_0", "process_1"}
        return
    # Each process wrote two of four experts, one of each device.
    files = sorted(checkpoint.path.glob("arrays-*.safetensors"))
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    assert {path.name for path in files} == manifest["files"].keys() - {"state.json"}
    assert [path.name for path in files] == [
        "arrays-00000-of-00002.safetensors",
        "arrays-00001-of-00002.safetensors",
    ]
    for number, path in enumerate(files):
        with opened_pieces([path]) as found_pieces:
            pieces = {
                piece.name.rpartition("@")[2]: piece.shape
                for (group, _), parts in found_pieces.items()
                for piece in parts
                if "/experts/hidden_kernel@" in piece.name and group == "model"
            }
        assert pieces == {
            f"{2 * number},0,0": (1, 16, 32),
            f"{2 * number + 1},0,0": (1, 16, 32),
        }
