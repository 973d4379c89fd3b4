"""A true run of two processes, each with half of the devices and of the batch."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from keras_moe.models.saving._weights_file import plain_values
from tests.forks import free_port, run_script


def weights_of(path):
    with h5py.File(path) as file:
        return plain_values(file)


def test_two_processes_train_evaluate_and_save_what_one_does(tmp_path):
    run_script(Path(__file__).with_name("two_processes.py"), free_port(), tmp_path)
    (losses, figures), (others, other_figures) = (
        json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1)
    )
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
