import json
import runpy
import shutil
from pathlib import Path

import pytest

from keras_moe.analysis import plots

ROOT = Path(__file__).resolve().parents[2]
ROUTERS = ["soft", "softmax_token_choice"]
TINY = [
    "--routers", *ROUTERS, "--selected", "1", "--seeds", "2", "--epochs", "1",
    "--batch-size", "64", "--set", "num_layers=1", "moe_layers=[0]", "hidden_dim=16",
    "num_heads=2", "mlp_dim=16", "num_experts=4",
]  # fmt: skip

pytestmark = pytest.mark.backend_free


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "router_study.py"))
    monkeypatch.setitem(tool["main"].__globals__, "TIMING_ROUNDS", 1)
    return tool


def run(tool, capsys, output, *arguments):
    status = tool["main"]([*TINY, "--output", str(output), *map(str, arguments)])
    return status, *capsys.readouterr()


def results_of(folder):
    """The summary and the runs, without what is measured in seconds."""
    results = json.loads((folder / "results.json").read_text())
    for row in results["summary"]:
        for key in ("step_seconds", "relative_step_time"):
            assert row.pop(key) > 0
    for record in results["runs"]:
        assert record["result"].pop("seconds") > 0
    return results["summary"], results["runs"]


def test_a_study_goes_on_where_it_stopped(tool, capsys, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    status, output, errors = run(tool, capsys, whole)
    assert status == 0, errors
    assert "softmax token choice" in output
    assert "finished before" not in output
    for picture in ("accuracy_over_cost", "curves"):
        assert (whole / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    # No router of these has a transport plan.
    assert not (whole / "curves_of_combine.png").exists()
    summary, runs = results_of(whole)
    assert [row["router"] for row in summary] == ["softmax_token_choice", "soft"]
    assert [record["seed"] for record in runs] == [0, 1, 0, 1]
    assert runs[0]["result"]["test_accuracy"] != runs[1]["result"]["test_accuracy"]
    for row in summary:
        curves = row["curves"]
        assert (row["combine"], curves["step"]) == ("softmax", [21])
        assert curves["train_loss"]["mean"][0] > 0
        last = row["grouped_test_accuracy"]
        accuracies = curves["grouped_test_accuracy"]
        for key in ("mean", "std"):
            assert accuracies[key] == [last[key]]
        assert 0.1 < row["test_accuracy"]["mean"] <= 1
        assert row["test_accuracy"]["std"] > 0
        assert 0.1 < row["few_shot_accuracy"]["mean"] <= 1
        assert row["step_time_over"] == "softmax_token_choice-1"
    token_choice, soft = summary
    assert 0 < token_choice["dropped_tokens"]["mean"] < 1
    assert soft["dropped_tokens"]["mean"] == 0
    assert soft["load_entropy"]["mean"] == pytest.approx(1)

    # An interrupted study: the second seed's file is cut off. Its run comes first now.
    part = tmp_path / "part"
    shutil.copytree(whole / "runs", part / "runs")
    (cut,) = part.glob("runs/soft-1-seed1-*.json")
    cut.write_text(cut.read_text()[:100])
    status, output, errors = run(tool, capsys, part)
    assert status == 0, errors
    assert output.count("finished before") == 3
    assert results_of(part) == (summary, runs)
    assert not list(part.rglob("*.part"))

    # Nothing is done twice, and an interruption has an exit status of its own.
    def interrupt(*arguments):
        raise KeyboardInterrupt

    for method in ("train", "time_steps"):
        monkeypatch.setattr(tool["Configuration"], method, interrupt)
    status, output, _ = run(tool, capsys, part)
    assert status == 0
    assert output.count("finished before") == 4
    assert results_of(part) == (summary, runs)
    status, _, errors = run(tool, capsys, part, "--learning-rate", 1e-3)
    assert status == 130
    assert "the same command goes on from here" in errors
    assert run(tool, capsys, part, "--restart")[0] == 130
    assert not list(part.glob("runs/*.json"))


def test_only_whole_results_of_the_same_settings_count(tool, tmp_path):
    path = tmp_path / "run.json"
    read, write = tool["read_result"], tool["write_json"]
    assert read(path, {"seed": 0}) is None
    write(path, {"settings": {"seed": 0}, "result": {"accuracy": 1.0}})
    assert read(path, {"seed": 0}) == {"accuracy": 1.0}
    assert read(path, {"seed": 1}) is None
    for text in (
        "",
        "[]",
        "3",
        "{}",
        '{"settings": {"seed": 0}}',
        path.read_text()[:9],
    ):
        path.write_text(text)
        assert read(path, {"seed": 0}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "digit"], "did you mean 'digits'"),
        (["--preset", "vmoe_digit"], "nearest: vmoe_digits"),
        (["--set", "hidden"], "Expected NAME=VALUE; received: hidden"),
        (["--set", "hidden=16"], "hidden_dim"),
        (["--set", "router=soft"], "an argument that the study does not set"),
        (["--batch-size", 500], "1347 and 450 images, batch_size=500"),
        (["--test-split", "validation"], "split='validation'"),
    ],
)
def test_wrong_arguments_are_explained(tool, capsys, tmp_path, arguments, message):
    status, _, errors = run(tool, capsys, tmp_path, *arguments)
    assert status == 1
    assert message in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routers", "softmax"], "invalid choice: 'softmax'"),
        (["--selected", 3], "invalid choice: 3"),
        (["--seeds", 0], "expected more than 0; received: 0"),
        (["--epochs", "many"], "invalid int value: 'many'"),
        (["--learning-rate", "nan"], "expected more than 0; received: nan"),
    ],
)
def test_the_parser_refuses(tool, capsys, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(tool, capsys, tmp_path, *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_diverged_runs_are_not_kept(tool, capsys, tmp_path):
    status, _, errors = run(tool, capsys, tmp_path, "--learning-rate", 1e30)
    assert status == 1
    assert "softmax_token_choice-1 with seed 0 diverged in epoch 1" in errors
    assert not list(tmp_path.glob("runs/*.json"))


def test_plans_combine_where_they_are_asked_to(tool, tmp_path):
    arguments = ["--combine", "affinity", "--output", str(tmp_path)]
    arguments = [*TINY, *arguments]
    arguments[1:3] = ["softmax_token_choice", "sinkhorn_expert_choice"]
    study = tool["Study"](tool["parse_arguments"](arguments))
    (configuration,) = study.configurations
    assert configuration.name == "sinkhorn_expert_choice-1-affinity"
    for model, batch_invariant in (
        (configuration.model, True),
        (configuration.grouped_model, False),
    ):
        router = model.backbone.get_layer("block_0").feed_forward.router
        assert (router.combine, router.batch_invariant) == ("affinity", batch_invariant)
    arguments[1:3] = ["soft"]
    arguments = tool["parse_arguments"](arguments)
    with pytest.raises(ValueError, match=r"received: routers=\['soft'\]"):
        tool["Study"](arguments)


def made_up_run(combine, *values):
    curves = {"train_loss": [2.0, 1.0], "grouped_test_accuracy": [0.5, values[0]]}
    measures = ("test_accuracy", "grouped_test_accuracy", "few_shot_accuracy")
    result = {**dict.fromkeys(measures, values[0]), "curves": curves}
    result.update(dropped_tokens=0.1, load_entropy=0.9)
    labels = {"router": "sinkhorn_token_choice", "selected": 2, "combine": combine}
    return {**labels, "seed": 0, "result": result}


def test_rows_of_plans_stand_beside_those_of_the_softmax(tool, tmp_path):
    runs = [made_up_run("softmax", 0.9), made_up_run("softmax", 0.8)]
    runs.append(made_up_run("affinity", 0.7))
    seconds = {
        "sinkhorn_token_choice-2": 1.0,
        "sinkhorn_token_choice-2-affinity": 1.5,
    }
    softmax, plan = rows = tool["summarise"](runs, seconds, steps_per_epoch=42)
    assert softmax["grouped_test_accuracy"]["mean"] == pytest.approx(0.85)
    assert softmax["curves"]["step"] == [42, 84]
    accuracies = softmax["curves"]["grouped_test_accuracy"]
    assert accuracies["mean"] == pytest.approx([0.5, 0.85])
    assert accuracies["std"] == pytest.approx([0.0, 0.1 / 2**0.5])
    assert (plan["combine"], plan["relative_step_time"]) == ("affinity", 1.5)
    pictures = tool["draw"](rows, tmp_path)
    names = ["accuracy_over_cost", "curves", "curves_of_combine"]
    assert [picture.stem for picture in pictures] == names
    assert all(picture.stat().st_size > 5_000 for picture in pictures)


def test_the_picture_needs_known_routers(tmp_path):
    row = {
        "router": "hard",
        "selected": 1,
        "relative_step_time": 1.0,
        "test_accuracy": {"mean": 0.9, "std": 0.0},
    }
    with pytest.raises(ValueError, match="received: hard"):
        plots.plot_router_study([row], tmp_path / "routers.png")
    for draw in (plots.plot_router_study, plots.plot_router_curves):
        with pytest.raises(ValueError, match=r"received: rows=\[\]"):
            draw([], tmp_path / "routers.png")
