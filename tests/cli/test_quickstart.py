"""`keras-moe quickstart`: from digits to a preset, figures and a picture."""

import json
import shlex

import keras
import pytest

from keras_moe import models
from keras_moe.cli.main import make_parser
from keras_moe.cli.quickstart import next_steps

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")


def test_the_next_steps_are_commands(tmp_path):
    commands = [shlex.split(step) for step in next_steps(tmp_path / "a preset")]
    assert len(commands) == 3
    for program, *arguments in commands:
        assert program == "keras-moe"
        make_parser().parse_args(arguments)
    assert commands[0][2] == str(tmp_path / "a preset")


def test_the_quickstart_runs_end_to_end(program, tmp_path):
    done = program("quickstart", "--epochs", 2, "--output", tmp_path)
    assert done.status == 0, done.errors
    assert "predictions are identical" in done.output
    assert "Three things to do next" in done.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["backend"] == keras.backend.backend()
    # Two epochs only: far above chance, which is 0.1.
    assert results["test_accuracy"] > 0.3
    assert set(results["routing"]) == {"block_1", "block_3"}
    for statistics in results["routing"].values():
        assert abs(sum(statistics["expert_shares"]) - 1) < 1e-6
        assert 0 < statistics["dropped_choices"] < 0.5
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(
        models.from_preset(str(tmp_path / "preset")), models.ViTImageClassifier
    )
