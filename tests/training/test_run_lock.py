"""Two trainings never share a run's folder; a killed one does not stop the next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_moe import training
from keras_moe.locks import FolderInUse

pytestmark = pytest.mark.backend_free
RECIPE = training.Recipe(
    "tiny",
    data={"batch_size": 512},
    model={
        "preset": "vmoe_digits",
        "load_weights": False,
        "num_layers": 1,
        "hidden_dim": 8,
        "moe_layers": None,
    },
    schedule={"epochs": 1, "learning_rate": 1e-3},
)


def test_a_second_training_is_refused_before_it_touches_the_first(tmp_path):
    folder = tmp_path / "run"
    with training.run_lock(folder):
        (folder / "step-00000001").mkdir()
        for resume in (True, False):
            message = f"run in {folder}; received: process {os.getpid()} on host"
            with pytest.raises(FolderInUse, match=message):
                training.train(RECIPE, checkpoint_dir=folder, resume=resume)
        assert (folder / "step-00000001").exists()
    assert not list(folder.glob(".*"))


def test_a_killed_training_does_not_stop_the_next(tmp_path):
    # The lock of a process that is no more, as after a kill.
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with training.run_lock(tmp_path):
        (lock,) = tmp_path.iterdir()
        owner = json.loads(lock.read_text())
    lock.write_text(json.dumps({**owner, "process": process.pid}))
    trained = training.train(RECIPE, checkpoint_dir=tmp_path, verbose=0)
    assert len(trained.history["loss"]) == 1
    assert not lock.exists()
    assert len(training.list_checkpoints(tmp_path)) == 1


def test_processes_that_train_one_model_share_its_folder(tmp_path, monkeypatch):
    with training.run_lock(tmp_path):
        monkeypatch.setattr(
            sys.modules["keras_moe.training.run_lock"], "process_shard", lambda: (1, 2)
        )
        with training.run_lock(tmp_path):
            assert len(list(Path(tmp_path).iterdir())) == 1


def test_a_remote_folder_is_not_locked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("gs://bucket/run", Path("gs://bucket/run")):
        with training.run_lock(folder):
            assert not list(tmp_path.iterdir())
