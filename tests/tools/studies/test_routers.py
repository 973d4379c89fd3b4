import json
import shutil

import pytest

from tests.tools.studies.few_digits import TINY_ROUTERS, load_few
from tools.studies import routers
from tools.studies.__main__ import make_parser
from tools.studies.routers import Configuration, summarise


@pytest.fixture
def study(done, monkeypatch):
    monkeypatch.setattr(routers, "TIMING_ROUNDS", 1)
    # Fewer than all 21 batches to train on, and all 8 to test.
    load_few(monkeypatch, routers, train=8, test=4)
    return lambda output: done("routers", *TINY_ROUTERS, "--output", output)


def results_of(folder):
    """The summary and the runs, without what is measured in seconds."""
    results = json.loads((folder / "results.json").read_text())
    for row in results["summary"]:
        for key in ("step_seconds", "relative_step_time"):
            assert row.pop(key) > 0
    for record in results["runs"]:
        assert record["result"].pop("seconds") > 0
    return results["summary"], results["runs"]


def test_a_study_resumes_where_it_stopped(study, tmp_path):
    whole = tmp_path / "whole"
    output = study(whole)
    assert "softmax token choice" in output
    assert "finished before" not in output
    summary, runs = results_of(whole)
    assert [row["router"] for row in summary] == ["softmax_token_choice", "soft"]
    assert [record["seed"] for record in runs] == [0, 1, 0, 1]
    assert runs[0]["result"]["test_accuracy"] != runs[1]["result"]["test_accuracy"]
    for row in summary:
        assert 0.1 < row["test_accuracy"]["mean"] <= 1
        assert row["test_accuracy"]["std"] > 0
        assert row["step_time_over"] == "softmax_token_choice-1"
    token_choice, soft = summary
    assert 0 < token_choice["dropped_tokens"]["mean"] < 1
    assert soft["dropped_tokens"]["mean"] == 0

    # An interrupted study: the second seed's file is cut off. Its run comes first now.
    part = tmp_path / "part"
    shutil.copytree(whole / "runs", part / "runs")
    (cut,) = part.glob("runs/soft-1-seed1-*.json")
    cut.write_text(cut.read_text()[:100])
    assert "3 of 4 runs were finished before" in study(part)
    assert results_of(part) == (summary, runs)


def test_diverged_runs_are_not_kept(study, program, tmp_path):
    arguments = ("--output", tmp_path, "--learning-rate", 1e30)
    errors = program("routers", *TINY_ROUTERS, *arguments).errors
    assert "softmax_token_choice-1 with seed 0 diverged in epoch 1" in errors
    assert not list(tmp_path.glob("runs/*.json"))


def test_plans_combine_where_they_are_asked_to():
    arguments = ["routers", *TINY_ROUTERS, "--combine", "affinity", "--routers"]
    parse = make_parser().parse_args
    args = parse([*arguments, "softmax_token_choice", "sinkhorn_expert_choice"])
    (row,) = routers.rows_of(args)
    configuration = Configuration(routers.Task(args), *row)
    assert configuration.name == "sinkhorn_expert_choice-1-affinity"
    for model, is_official in (
        (configuration.model, False),
        (configuration.grouped_model, True),
    ):
        router = model.backbone.get_layer("block_0").feed_forward.router
        assert router.combine == "affinity"
        assert (router.evaluation == "official") == is_official


def made_up_run(combine, *values):
    curves = {"train_loss": [2.0, 1.0], "grouped_test_accuracy": [0.5, values[0]]}
    measures = ("test_accuracy", "grouped_test_accuracy", "few_shot_accuracy")
    result = {**dict.fromkeys(measures, values[0]), "curves": curves}
    result.update(dropped_tokens=0.1, load_entropy=0.9)
    labels = {"router": "sinkhorn_token_choice", "selected": 2, "combine": combine}
    return {**labels, "seed": 0, "result": result}


def test_rows_of_plans_stand_beside_those_of_the_softmax(tmp_path):
    runs = [made_up_run("softmax", 0.9), made_up_run("softmax", 0.8)]
    runs.append(made_up_run("affinity", 0.7))
    name = "sinkhorn_token_choice-2"
    seconds = {name: 1.0, f"{name}-affinity": 1.5}
    softmax, plan = rows = summarise(runs, seconds, steps_per_epoch=42)
    assert softmax["grouped_test_accuracy"]["mean"] == pytest.approx(0.85)
    accuracies = softmax["curves"]["grouped_test_accuracy"]
    assert accuracies["mean"] == pytest.approx([0.5, 0.85])
    assert accuracies["std"] == pytest.approx([0.0, 0.1 / 2**0.5])
    assert (plan["combine"], plan["relative_step_time"]) == ("affinity", 1.5)
    pictures = routers.draw(rows, tmp_path)
    names = ["accuracy_over_cost", "curves", "curves_of_combine"]
    assert [picture.stem for picture in pictures] == names
    assert all(picture.stat().st_size > 5_000 for picture in pictures)
