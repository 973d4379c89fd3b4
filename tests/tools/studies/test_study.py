"""The base of all studies: runs that are made once, seeds, parts and results."""

import json

import numpy as np
import pytest
from rich.console import Console

from tools.studies.study import Part, Run, Study, percent, plus_minus, run_parts, spread

SETTINGS = {"epochs": 2, "backend": "jax"}


@pytest.fixture
def new_study(tmp_path, capsys):
    def make(**changes):
        return Study(tmp_path, {**SETTINGS, **changes}, Console(width=160))

    return make


class Training:
    """A run that counts how often it was made."""

    def __init__(self, arrays=None):
        self.count, self.arrays = 0, arrays or {}

    def __call__(self, on_progress):
        self.count += 1
        on_progress("loss 0.5")
        return {"accuracy": 0.5 + self.count, "steps": (1, 2)}, self.arrays


def test_a_run_is_made_once(new_study):
    training = Training({"gates": np.arange(3.0)})
    run = Run("tau=0.75", 1, {"tau": 0.75}, training)
    texts = []
    result = new_study().finish(run, texts.append)
    assert result == {"accuracy": 1.5, "steps": [1, 2]}
    assert texts == ["loss 0.5"]
    # Another process, which shares the files alone.
    study = new_study()
    assert study.finish(run) == result
    assert study.arrays(run)["gates"].tolist() == [0, 1, 2]
    assert training.count == 1
    assert study.path(run).name.startswith("tau_0_75-seed1-")


def test_other_settings_are_other_runs(new_study):
    training = Training()
    run = Run("vanilla", 0, {"size": 1}, training)
    new_study().finish(run)
    new_study(epochs=3).finish(run)
    new_study().finish(run._replace(seed=1))
    new_study().finish(run._replace(name="other"))
    new_study().finish(run._replace(settings={"size": 2}))
    assert training.count == 5
    # A label is for people alone.
    new_study().finish(run._replace(label="the vanilla twin"))
    assert training.count == 5


def test_damaged_files_are_no_results(new_study):
    training = Training({"gates": np.arange(300.0)})
    study, run = new_study(), Run("vanilla", 0, {}, training)
    study.finish(run)
    path = study.path(run)
    arrays = path.with_suffix(".npz")
    whole = path.read_text()
    for text in ("[]", whole[:99], whole.replace('"accuracy": 1.5', '"accuracy": 2')):
        path.write_text(text)
        assert study.finished(run) is None
    path.write_text(whole)
    arrays.write_bytes(arrays.read_bytes()[:100])
    study.finish(run)
    assert training.count == 2
    assert study.arrays(run)["gates"].shape == (300,)


class Sum(Part):
    def __init__(self, study, value):
        super().__init__(study)
        self.value = value

    def results(self):
        if self.value is None:
            raise KeyboardInterrupt
        return {"sum": self.value}

    def show(self, results, console):
        console.print(f"the sum is {results['sum']}")

    def draw(self, every):
        return [self.study.folder / f"{len(every)}.png"]


def test_parts_of_earlier_commands_stay(new_study, capsys):
    study = new_study()
    result = run_parts(study, {"first": Sum(study, 1)})
    own = {"backend": "jax", "settings": SETTINGS}
    assert result.values == {**own, "first": {"sum": 1}}
    text = capsys.readouterr().out
    assert "the sum is 1" in text
    assert "3.png" in text
    # Those that were done before an interruption, too.
    with pytest.raises(KeyboardInterrupt):
        run_parts(study, {"second": Sum(study, 2), "third": Sum(study, None)})
    stored = json.loads(study.results_path.read_text())
    assert stored == {**own, "first": {"sum": 1}, "second": {"sum": 2}}
    # Figures of another backend, or with other settings, are not mixed with these.
    for change in ({"backend": "torch"}, {"epochs": 3}):
        study.results_path.write_text(json.dumps(stored))
        other = new_study(**change)
        settings = {**SETTINGS, **change}
        assert run_parts(other, {"third": Sum(other, 3)}).values == {
            "backend": settings["backend"],
            "settings": settings,
            "third": {"sum": 3},
        }


def test_spreads():
    assert spread([0.5]) == {"mean": 0.5, "std": 0.0, "min": 0.5, "max": 0.5}
    value = spread([0.5, 0.7])
    assert value["mean"] == pytest.approx(0.6)
    assert value["std"] == pytest.approx(0.02**0.5)
    assert percent(value) == "60.0±14.1"
    assert plus_minus(value) == "0.60±0.14"
