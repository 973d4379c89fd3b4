"""Twins cost what the model costs, and runs are compared seed by seed, and once."""

import json
import shutil

import numpy as np
import pytest

from keras_moe import data
from keras_moe.training import Recipe, Twin, Twins, load_recipe, twin_runs, twins
from tests.refusals import refuses
from tests.training.runs import linear_model, short_recipe


@pytest.mark.parametrize(("name", "changes", "mlp_dim"), [
    # In two of four blocks a second expert, 128 units, and a router of 8 x 64
    # weights, which are 4 of the 2 x 64 of a unit: 128 + (2 x (128 + 4)) / 4.
    ("vmoe_digits", {}, 194),
    ("vmoe_digits", {"router": "soft", "moe_layers": "every_1"}, None),
    ("moepp_digits", {"zero_experts": 2, "tau": 0.5}, None),
])  # fmt: skip
def test_twins_cost_what_the_model_costs(name, changes, mlp_dim):
    recipe = load_recipe(name).replace(model={**changes, "dropout_rate": 0.1})
    (_, cost), *others = (both := twin_runs.twin_models(recipe, 10)).values()
    (dense, dense_cost), (wide, wide_cost) = others
    assert list(both) == ["experts", "dense", "wide"]
    assert dense_cost.gflops == pytest.approx(cost.gflops, rel=0.01)
    assert wide_cost.parameters == pytest.approx(cost.parameters, rel=0.01)
    assert mlp_dim in (None, dense.overrides["mlp_dim"])
    for twin in (dense, wide):
        # Nothing of the experts is left, and everything else is.
        assert set(twin.overrides) == {"moe", "mlp_dim", "dropout_rate"}
        groups = twin_runs._twin(recipe, twin, 10).optimizer.groups
        matches = [group["match"] for group in recipe.optimizer.groups]
        assert [x["match"] for x in groups] == [x for x in matches if x != "router"]


def comparison(*seeds):
    """Twins with the accuracies of experts, dense and wide models, seed by seed."""
    costs = {"experts": (9, 2.0), "dense": (4, 2.0), "wide": (9, 4.0)}
    figures = {"nll": 1.0, "ece": 0.5, "loss": 2.0}
    every = zip(costs.items(), zip(*seeds))
    return Twins(
        "mine",
        {
            name: Twin(
                {}, *cost, 0.1, {"0.1": 1.0}, [{"accuracy": x, **figures} for x in own]
            )
            for (name, cost), own in every
        },
    )


def test_differences_are_taken_seed_by_seed():
    # 2 and 4 points, whose deviation is the root of 2; -5 and 5 points.
    seeds = (0.90, 0.88, 0.95), (0.94, 0.90, 0.89)
    both = comparison(*seeds)
    assert both.difference("dense") == pytest.approx((0.03, 0.01))
    assert both.difference("wide") == pytest.approx((0.0, 0.05), abs=1e-9)
    assert both.difference("wide", "loss") == (0.0, 0.0)
    # Of two seeds, 3 errors are within Student's interval, and not of six.
    assert "(+3.00 ± 1.00 points)" in both._found("dense")
    assert comparison(*3 * seeds).sentence == (
        "Over 6 seeds on mine the experts are 3.00 ± 0.45 points more accurate than a "
        "dense model of equal FLOPs, and show no difference from one of equal "
        "parameters (+0.00 ± 2.24 points) at 0.50 of its FLOPs."
    )
    one = comparison((0.5, 0.75, 0.5))
    assert one.difference("dense") == (-0.25, None)
    assert one.sentence == (
        "With one seed, which gives no error, on mine the experts are 25.00 points "
        "less accurate than a dense model of equal FLOPs, and show no difference from "
        "one of equal parameters (+0.00 points) at 0.50 of its FLOPs."
    )
    # 1 and 4 points: 2.5 ± 1.5.
    assert "no difference" in comparison((0.5, 0.49, 1), (0.5, 0.46, 1))._found("dense")
    # An image of 450 more with each seed is no error of 0, nor one of rounding.
    for correct in ((300, 300, 300), (301, 417, 326), (399, 407, 302)):
        equal = comparison(*(((n + 1) / 450, n / 450, 1) for n in correct))
        assert "no difference" in equal._found("dense")


@pytest.mark.parametrize("count", [2, 3, 5, 10, 12])
def test_intervals_are_students(count):
    stats = pytest.importorskip("scipy.stats")
    exact = stats.t.ppf(0.975, count - 1)
    errors = np.linspace(-1, 1, count) / 1000
    for scale, found in ((1.02, "more accurate"), (0.98, "no difference")):
        # More than 10 seeds need as much as 10.
        mean = scale * max(exact, 2.26 if count > 10 else 0)
        mean *= errors.std(ddof=1) / count**0.5
        seeds = [(0.5 + mean + error, 0.5, 0.5) for error in errors]
        assert found in comparison(*seeds)._found("dense")


def recipe(**settings):
    common = {"preset": "vmoe_digits", "epochs": 2, "batch_size": 512}
    return short_recipe(**{**common, "learning_rate": 0.1, **settings})


def test_images_to_choose_by_are_not_trained_on(tmp_path):
    for held_out, size in ((100, 100), (0.1, 135)):
        own = twin_runs._with_held_out(recipe(), held_out, None)
        runs = twin_runs._Runs(own, {"dense": own}, tmp_path, None, 1, None)
        # All runs have the section that remembers them.
        section = runs._run("dense", 0.1, 1)[0].data
        assert section is own.data
        left = section.left_out()
        train, chosen = (np.delete(np.arange(1347), x) for x in left)
        assert len(chosen) == size
        assert sorted([*train, *chosen]) == list(range(1347))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", lambda self, num_classes: linear_model())


def test_runs_are_done_once(small, monkeypatch, tmp_path):
    load, splits, begun = data.load, [], []

    def spy(source, split, *args, **kwargs):
        splits.append(split)
        return load(source, split, *args, **kwargs)

    monkeypatch.setattr(data, "load", spy)

    def run(seeds=2):
        del splits[:], begun[:]
        rates = [1e-6, 0.1]
        return twins(
            recipe(), tmp_path, seeds, rates, 200, 2,
            progress=lambda done, total, text: begun.append((done, total, text)),
        )  # fmt: skip

    def runs():
        return [text for _, _, text in begun if "epoch" not in text]

    first = run()
    models = list(first.models.values())
    # Validation chooses: too small a rate learns nothing.
    for twin in models:
        assert twin.learning_rate == 0.1
        assert twin.tried["0.1"] < twin.tried["1e-06"]
        assert len(twin.runs) == 2
    # The stand-ins are equal, and so are the batches that they see.
    assert models[0].runs == models[1].runs == models[2].runs
    assert models[0].runs[0] != models[0].runs[1]
    assert "show no difference from a dense model" in first.sentence
    # Each of 6 models reads the test images once, after all trainings.
    assert splits.count("test") == 6
    assert "test" not in splits[: splits.index("test")]
    last = max(number for number, text in enumerate(runs()) if "rate" in text)
    assert [("test images" in text) for text in runs()[last + 1 :]] == [True] * 6 + [
        False
    ]
    assert begun[-1] == (15, 16, "times of training steps")
    stored = json.loads((tmp_path / "twins.json").read_text())
    assert stored["sentence"] == first.sentence
    assert (stored["held_out"], stored["recipe"]) == (200, recipe().to_dict())
    assert stored["models"]["wide"]["runs"] == models[2].runs
    # The run of a deleted folder is repeated, to the bit, and no other.
    shutil.rmtree(tmp_path / "runs" / "dense-rate0.1-seed1")
    assert run() == first
    assert runs() == ["dense, learning rate 0.1, seed 1", "dense, seed 1, test images"]
    assert splits.count("test") == 1
    assert run(seeds=1).models["wide"].runs == models[2].runs[:1]
    assert begun == []
    # Runs of other settings stay, and are not mixed with these at other rates.
    other = recipe().replace(**{"schedule.epochs": 3})
    before = {x: x.read_bytes() for x in tmp_path.rglob("*.json")}
    for rates in ([1e-6, 0.1], [0.2]):
        refuses(r"epochs=3 \(there 2\)", twins, other, tmp_path, 2, rates, 200, 2)
    assert {x: x.read_bytes() for x in tmp_path.rglob("*.json")} == before
    # A damaged file is made again, from the checkpoint.
    (tmp_path / "runs" / "wide-rate0.1-seed0" / "run.json").write_text("{")
    assert run() == first
    assert [text for text in begun if "epoch" in text[2]] == []


def test_settings_that_never_trained_do_not_stay(small, tmp_path):
    late = recipe().replace(**{"schedule.warmup_steps": 100})
    refuses("warmup_steps", twins, late, tmp_path, 1, [0.1], 200, 0)
    assert twins(recipe(), tmp_path, 1, [0.1], 200, 0).models["experts"].runs


def test_a_rate_that_diverges_is_not_chosen(small, tmp_path):
    own = twin_runs._with_held_out(recipe(), 200, None)
    runs = twin_runs._Runs(recipe(), {"dense": own}, tmp_path, None, 1, None)
    record = runs.trained("dense", 1e38, 0)
    assert "learning_rate=1e+38" in record["diverged"]
    assert runs.trained("dense", 1e38, 0) == record
    assert twin_runs._best("dense", {1e38: record, 0.1: {"nll": 2.0}}) == 0.1
    refuses("dense does not diverge", twin_runs._best, "dense", {1e38: record})


@pytest.mark.parametrize(("settings", "options", "message"), [
    ({"multi_label": "multi_label"}, {}, "objective='multi_label'"),
    ({"model_arguments": {"moe_layers": None}}, {}, "a model with experts"),
    ({"model_arguments": {"load_weights": True}}, {}, "load_weights=True"),
    ({"model_arguments": {"multi_label": True}}, {}, "multi_label=True"),
    ({}, {"learning_rates": []}, r"learning_rates=\[\]"),
    ({}, {"learning_rates": [0.1, 0.1]}, r"learning_rates=\[0.1, 0.1\]"),
    ({}, {"held_out": 1000}, "held_out=1000, batch_size=512"),
    ({}, {"held_out": 2.5}, "held_out=2.5"),
    ({}, {"seeds": 0}, "seeds=0"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(settings, options, message, tmp_path):
    refuses(message, twins, recipe(**settings), tmp_path, **options)
    assert not any(tmp_path.iterdir())
