import json

from keras_moe.training import Recipe
from tests.training.runs import linear_model


def test_one_command_compares_and_resumes(monkeypatch, done, tmp_path):
    monkeypatch.setattr(Recipe, "new_model", lambda self, num_classes: linear_model())
    command = (
        "twins", "vmoe_digits", "--seeds", 1, "--rates", 0.1, "--held-out", 300,
        "--timed-steps", 1, "--output", tmp_path / "run", "--recipe-set",
        "schedule.epochs=1", "schedule.cooldown_steps=0", "schedule.warmup_steps=0",
        "data.batch_size=512", "optimizer.groups=[]", "optimizer.ema_momentum=null",
    )  # fmt: skip
    output = done(*command)
    assert "1 of 7: experts, learning rate 0.1, seed 0" in output
    assert "Twins on digits" in output
    stored = json.loads((tmp_path / "run" / "twins.json").read_text())
    assert output.endswith(f"\n{stored['sentence']}\n")
    picture = tmp_path / "run" / "twins.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = done(*command, "--json")
    assert " of 7: " not in again
    assert json.loads(again)["models"] == stored["models"]
