"""The study of experts: what it chooses, tests once, stores and draws."""

import numpy as np
import pytest
from rich.console import Console

from keras_moe import training
from tools.studies.experts import DENSE, MODEL, WIDE, Comparison, Model, Task, moe
from tools.studies.study import Study, weights_as_arrays


@pytest.fixture
def task(tmp_path):
    recipe = training.Recipe(
        "tiny",
        data={"batch_size": 32, "augment": ["flip"]},
        model={**MODEL, "num_layers": 1},
        schedule={"epochs": 1, "learning_rate": 1e-2},
    )
    return Task(Study(tmp_path, {}, Console()), recipe, 32, 64)


def test_settings_are_chosen_on_images_that_are_held_out(task, monkeypatch):
    rates = {
        name: Model({**DENSE, "schedule.learning_rate": rate})
        for name, rate in (("slow", 1e-6), ("fast", 1e-2))
    }
    sparse = Model(moe(2, "every_1"), DENSE, reinitialize=0.5)
    rows = {"dense": rates, "drop-upcycled": {"": sparse}}
    part = Comparison(task.study, "upcycled", {"digits": (task, rows)}, seeds=1)
    results = part.results()
    dense, upcycled = results["digits"].values()
    assert dense["chosen"] == min(dense["tried"], key=lambda x: dense["tried"][x])
    assert dense["difference"]["mean"] == 0
    difference = upcycled["accuracies"][0] - dense["accuracies"][0]
    assert upcycled["difference"]["mean"] == difference
    # The dense model of "fast" is the one with which the other begins.
    names = [path.name.partition("-")[0] for path in task.study.runs.glob("*.json")]
    assert sorted(names) == ["step_times", *["tested"] * 2, *["trained"] * 3]
    assert dense["step_ms"] > 0
    part.show(results, task.study.console)
    pictures = part.draw({"upcycled": results, "models": results})
    assert [path.name for path in pictures] == ["experts.png", "errors_models.png"]
    assert all(path.stat().st_size > 5_000 for path in pictures)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Task, "train", interrupt)
    assert part.results() == results


def test_train_and_held_out_images_are_others(task):
    held_out, train = (set(task.parts[x]) for x in ("validation", "train"))
    assert (len(held_out), len(train), len(held_out & train)) == (32, 64, 0)


def test_classes_that_are_left_out_are_only_probed(task):
    own = Task(task.study, task.recipe, 32, left_out=range(5, 10))
    labels = own.whole("train")[1]
    assert set(labels[np.concatenate(list(own.parts.values()))]) == set(range(5))
    weights = weights_as_arrays(own.recipe_of(DENSE, 0).new_model(own.classes))
    assert set(own.probes(DENSE, weights)) == {"ten_shot_left_out"}


def test_models_to_compare_have_equal_costs(task):
    task.recipe = task.recipe.replace(model={"num_layers": 4})
    dense, wide, sparse = map(task.costs, (DENSE, WIDE, moe(1)))
    assert wide["parameters"] == pytest.approx(sparse["parameters"], rel=0.02)
    assert sparse["mflops"] == pytest.approx(dense["mflops"], rel=0.02)
