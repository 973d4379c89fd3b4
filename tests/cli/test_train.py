import json
import re
import shutil

import keras
import numpy as np
import pytest

from keras_moe import models, training
from keras_moe.cli.train import advice
from tests.pipelines import SHAPE, save

SMALL = ["image_shape=[8,8,1]", "patch_size=4", "hidden_dim=8", "num_layers=2"]
SMALL += ["token_mlp_dim=4", "mlp_dim=8", "num_experts=2", "rematerialize=true"]
SETTINGS = ["schedule.epochs=2", "data.batch_size=256", "schedule.warmup_steps=2"]
SETTINGS += ["model.dtype=mixed_bfloat16"]


@pytest.fixture
def train(program):
    return lambda *arguments: program("train", *arguments)


def broken_report(*args, **kwargs):
    raise RuntimeError("[broken]")


def test_one_command_trains_and_saves(train, tmp_path, monkeypatch, done):
    output = done(
        "train", "mumoe_digits", "--output", tmp_path / "run",
        "--recipe-set", *SETTINGS, "--set", *SMALL,
        "--few-shot-every", 2, "--shots", 2, "--checkpoint-every", 4,
        "--report-examples", 5,
    )  # fmt: skip
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report["examples"] == 5
    # The report's first picture is the card's.
    card = tmp_path / "run" / "preset" / "card.png"
    first = tmp_path / "run" / "report" / report["pictures"][0]
    assert card.read_bytes() == first.read_bytes()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["backend"] == keras.backend.backend()
    # Settings that were overridden, and one that was not.
    assert results["recipe"]["schedule"]["epochs"] == 2
    assert results["recipe"]["model"]["hidden_dim"] == 8
    assert results["recipe"]["model"]["load_weights"] is False
    assert {name: len(values) for name, values in results["history"].items()} == {
        **dict.fromkeys(("loss", "accuracy", "val_loss", "val_accuracy"), 2),
        **{f"router/{name}": 2 for name in ("entropy", "dead", "dropped", "max_gate")},
        "few_shot/2_shot": 1,
    }
    # The channels' and the tokens' experts of two blocks.
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
    (events,) = (tmp_path / "run" / "tensorboard" / "training").iterdir()
    for tag in (b"loss", b"val_accuracy", b"few_shot/2_shot", b"learning_rate"):
        assert tag in events.read_bytes()
    # A line for each epoch, since the output is no terminal.
    assert output.count("Epoch") == 2
    assert "\r" not in output
    card = (tmp_path / "run" / "preset" / "README.md").read_text(encoding="utf-8")
    # Not the built-in preset of the recipe's name.
    assert 'from_preset("./preset")' in card
    assert "type: accuracy" in card
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000004", "step-00000008", "step-00000010"]
    # The same command again has nothing to do; another recipe is another run.
    again = ("mumoe_digits", "--output", tmp_path / "run", "--set", *SMALL)
    again += ("--recipe-set", *SETTINGS)
    # Nothing is left but the report, which is made of a finished run, too.
    shutil.rmtree(tmp_path / "run" / "report")
    done("train", *again, "--report-examples", 4)
    page = (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
    assert "4 of 450, drawn with seed 0" in page
    assert "Routed experts" not in output
    # A report that fails leaves the trained model, and its older report.
    shutil.rmtree(tmp_path / "run" / "preset")
    monkeypatch.setattr("keras_moe.report.write_report", broken_report)
    status, output, errors = train(
        *again, "--report-examples", 5, "--json", "--traceback"
    )
    assert status == 0, errors
    assert "warning: no report, since it failed: RuntimeError: [broken]" in errors
    assert "in broken_report" in errors
    assert (tmp_path / "run" / "preset" / "task.weights.h5").is_file()
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    assert "Epoch" not in output + errors
    assert json.loads(output)["history"] == results["history"]
    repeated = json.loads((tmp_path / "run" / "results.json").read_text())
    assert repeated["history"] == results["history"]
    assert repeated["router_health"] == results["router_health"]
    status, _, errors = train(*again, "schedule.epochs=3")
    assert status == 2
    assert "schedule.epochs=3 (there 2)" in errors
    assert all(name in errors for name in ("--output", "--restart", "--extend"))


def test_your_own_photos_in_one_command(done, tmp_path):
    for number, name in enumerate(("cat", "dog") * 5):
        save(tmp_path / "photos" / name / f"{number}.png", 200 * (number % 2))
    output = done(
        "train", "finetune", "--data", f"folder:{tmp_path / 'photos'}",
        "--preset", "vmoe_digits", "--output", tmp_path / "run",
        "--batch-size", 8, "--epochs", 2, "--learning-rate", 1e-3,
    )  # fmt: skip
    height, width, _ = SHAPE
    assert "starts from the weights of vmoe_digits\n" in output
    sizes = f"16x16 grey, from {width}x{height}"
    assert f"8 images to train on, 2 to test on: {sizes}\n" in output
    probe = re.search(r"linear probe +(\S+) with the starting features", output)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (float(probe[1]), results["linear_probe"]) == (1.0, 1.0)
    schedule = results["recipe"]["schedule"]
    assert (schedule["epochs"], schedule["learning_rate"]) == (2, 1e-3)
    card = (tmp_path / "run" / "preset" / "README.md").read_text(encoding="utf-8")
    assert "started from `vmoe_digits`, whose licence is apache-2.0." in card
    line = re.search(r"use it +from_preset\((.*)\)\.classify\(photo\)", output)
    model = models.from_preset(json.loads(line[1]))
    photo = keras.utils.load_img(tmp_path / "photos" / "cat" / "0.png")
    assert {x.name for x in model.classify(np.asarray(photo))} == {"cat", "dog"}


def test_what_to_change_below_the_linear_probe():
    learns = {"accuracy": [0.2, 0.5], "val_accuracy": [0.3, 0.6]}
    assert advice(learns, "val_accuracy").startswith("raise --epochs")
    fits = {**learns, "accuracy": [0.2, 0.9]}
    assert advice(fits, "val_accuracy").startswith("lower --learning-rate")


def test_recipes_are_listed(done):
    assert json.loads(done("train", "--list", "--json")) == training.list_recipes()


@pytest.mark.parametrize("flag", [(), ("--extend",)])
def test_a_run_is_extended_where_it_is_asked_for(train, tmp_path, monkeypatch, flag):
    def stub(recipe, extend, **_):
        schedule = recipe.schedule
        raise ValueError(
            f"{schedule.epochs} {schedule.patience} {schedule.best} {extend}"
        )

    monkeypatch.setattr("keras_moe.training.train", stub)
    status, output, errors = train(
        "mumoe_digits", "--output", tmp_path, *flag,
        "--recipe-set", "schedule.epochs=40", "schedule.patience=5",
        "schedule.best=restore",
    )  # fmt: skip
    # No table of settings above a line of what is wrong.
    assert (status, output) == (2, "")
    assert errors == f"error: 40 5 restore {bool(flag)}\n"
