import json
import runpy
from pathlib import Path

import keras
import pytest

from keras_moe import models

ROOT = Path(__file__).resolve().parents[2]
SMALL = tuple(
    f"model.{setting}"
    for setting in (
        "image_shape=[8,8,1]",
        "patch_size=4",
        "hidden_dim=8",
        "num_layers=2",
        "token_mlp_dim=4",
        "mlp_dim=8",
        "num_experts=2",
        "rematerialize=true",
    )
)
SETTINGS = (
    "schedule.epochs=2",
    "data.batch_size=256",
    "schedule.warmup_steps=2",
    "model.dtype=mixed_bfloat16",
)


@pytest.fixture
def program(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    main = runpy.run_path(str(ROOT / "tools" / "train.py"))["main"]

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_one_command_trains_and_saves(program, tmp_path):
    status, output, errors = program(
        "--recipe", "mumoe_digits", "--output", tmp_path / "run",
        "--set", *SETTINGS, *SMALL,
        "--few-shot-every", 2, "--shots", 2, "--checkpoint-every", 4,
    )  # fmt: skip
    assert status == 0, errors
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["backend"] == keras.backend.backend()
    # What was overridden, and what was not.
    assert results["recipe"]["schedule"]["epochs"] == 2
    assert results["recipe"]["model"]["hidden_dim"] == 8
    assert results["recipe"]["model"]["stochastic_depth"] == 0.1
    assert {name: len(values) for name, values in results["history"].items()} == {
        **dict.fromkeys(("loss", "accuracy", "val_loss", "val_accuracy"), 2),
        **{f"router/{name}": 2 for name in ("entropy", "dead", "dropped", "max_gate")},
        "few_shot/2_shot": 1,
    }
    # Of two blocks the channels' experts, and the tokens'.
    assert [row["epoch"] for row in results["router_health"]] == [1] * 4 + [2] * 4
    assert results["evaluations"][0]["epoch"] == 2
    assert results["history"]["loss"][1] < results["history"]["loss"][0]
    assert "learning_rate" in output
    assert f"val_accuracy       {results['score']:.4f}" in output
    model = models.from_preset(str(tmp_path / "run" / "preset"))
    assert model.count_params() == results["parameters"]
    assert model.backbone.get_layer("block_1").stochastic_depth == 0.1
    for name in ("training", "router_health"):
        picture = (tmp_path / "run" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000004", "step-00000008", "step-00000010"]
    # The same command again has nothing to do; another recipe is another run.
    again = ("--recipe", "mumoe_digits", "--output", tmp_path / "run", "--set")
    status, output, errors = program(*again, *SETTINGS, *SMALL)
    assert status == 0, errors
    assert "Epoch" not in output
    repeated = json.loads((tmp_path / "run" / "results.json").read_text())
    assert repeated["history"] == results["history"]
    assert repeated["router_health"] == results["router_health"]
    status, _, errors = program(*again, *SETTINGS, *SMALL, "schedule.epochs=3")
    assert status == 1
    assert "schedule.epochs=3 (there 2)" in errors


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "mumoe_digit"), "nearest: mumoe_digits"),
        (("--set", "epoch=1"), "nearest: schedule.epochs"),
        (("--set", "epochs"), "NAME=VALUE"),
        (("--set", "schedule.epochs=-1"), "epochs=-1"),
        (("--set", "schedule.patience=0"), "patience=0"),
        (("--set", "schedule.best=last"), "best='last'"),
        (("--set", "model.num_layer=1"), "nearest: num_layers"),
        (("--data", "digit"), "source='digit'"),
        (("--data", "folder:nowhere"), "source='folder:nowhere'"),
        (("--set", "schedule.warmup_steps=9999"), "received: warmup_steps=9999"),
        (("--set", "data.batch_size=9999"), "received: batch_size=9999"),
        (("--output", "README.md"), "README.md"),
    ],
)
def test_bad_input_ends_with_one_line(program, tmp_path, arguments, message):
    given = {"--recipe": "mumoe_digits", "--output": tmp_path, "--set": SMALL[3]}
    rest = [x for pair in given.items() if pair[0] not in arguments for x in pair]
    status, _, errors = program(*arguments, *rest)
    assert status == 1
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1
    assert message in errors
    assert not (tmp_path / "results.json").exists()


@pytest.mark.backend_free
@pytest.mark.parametrize("flag", [(), ("--extend",)])
def test_a_run_is_extended_where_it_is_asked_for(program, tmp_path, monkeypatch, flag):
    def train(recipe, extend, **_):
        raise ValueError(
            f"{recipe.schedule.epochs} {recipe.schedule.patience} "
            f"{recipe.schedule.best} {extend}"
        )

    monkeypatch.setattr("keras_moe.training.train", train)
    status, output, errors = program(
        "--recipe", "mumoe_digits", "--output", tmp_path, *flag,
        "--set", "schedule.epochs=40", "schedule.patience=5", "schedule.best=restore",
    )  # fmt: skip
    assert (status, errors) == (1, f"error: 40 5 restore {bool(flag)}\n")
    assert "patience" in output


@pytest.mark.backend_free
def test_a_recipe_is_needed(program):
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 2
