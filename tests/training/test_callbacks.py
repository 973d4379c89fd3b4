"""Callbacks: the best epoch, and longer runs."""

import warnings

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training import BestEpoch, Recipe, train
from tests.compare import to_numpy
from tests.refusals import refuses
from tests.training import runs

# Of the epochs.
SCORES = [0.1, 0.5, 0.4, 0.5, 0.6, 0.2, 0.1]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", runs.dropout_model)
    # Order and resumption of the recipe's own data are shown in `test_run.py`.
    monkeypatch.setattr(Recipe, "datasets", runs.noise)


def recipe(**settings):
    # Seven steps in an epoch.
    common = {"preset": "vmoe_digits", "batch_size": 192, "learning_rate": 1e-2}
    return runs.short_recipe(**{"epochs": 6, **common, **settings})


class Scores(keras.callbacks.Callback):
    """A metric that is known beforehand."""

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = SCORES[epoch]


def run(folder, mine, *callbacks, **options):
    return runs.quick_run(folder, mine, Scores(), *callbacks, **options)


def assert_same(actual, expected):
    assert (actual.history, actual.score) == (expected.history, expected.score)
    runs.assert_same_arrays(actual, expected)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ema_momentum", [None, 0.9])
def test_a_killed_run_stops_and_finds_its_best_epoch_like_another(
    tmp_path, ema_momentum
):
    averages = {"ema_momentum": ema_momentum}
    mine = recipe(monitor="score", patience=2, best="restore", **averages)
    whole = run(tmp_path / "whole", mine, keep_checkpoints=1)
    # A score as high as the best is no better one.
    assert whole.history["score"] == SCORES[:4]
    assert whole.score == whole.history["val_accuracy"][1]
    assert names(tmp_path / "whole") == ["step-00000014", "step-00000028"]
    # Within the third epoch, and within the fourth.
    for steps in (16, 8):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", mine, runs.Ends(steps), keep_checkpoints=1)
        assert "step-00000014" in names(tmp_path / "killed")
    killed = run(tmp_path / "killed", mine, keep_checkpoints=1)
    assert_same(killed, whole)
    assert names(tmp_path / "killed") == names(tmp_path / "whole")
    # At its end, it is the same again.
    assert_same(run(tmp_path / "killed", mine, runs.Ends(0)), whole)
    # The weights are those of a run that ended there.
    expected = train(recipe(epochs=2, schedule_steps=42, **averages), verbose=0)
    np.testing.assert_array_equal(
        to_numpy(whole.model.weights[0].value),
        to_numpy(expected.model.weights[0].value),
    )


def test_the_best_epoch_is_kept_beside_the_newest(tmp_path):
    newest = run(tmp_path, recipe(monitor="score", best="keep"), keep_checkpoints=1)
    assert names(tmp_path) == ["step-00000035", "step-00000042"]
    assert newest.score == newest.history["val_accuracy"][-1]
    state = training.find_checkpoint(tmp_path).state
    assert state["best"] == [35, 4]
    assert state["callbacks"]["BestEpoch 1"]["value"] == 0.6
    # One that is lost leaves the newest.
    for path in (tmp_path / "step-00000035").iterdir():
        path.write_bytes(b"")
    checkpoint = training.RunCheckpoint(tmp_path, 7)
    checkpoint.best_step = 35
    with pytest.warns(UserWarning, match=r"is that of the last epoch: .*step-00000035"):
        assert not checkpoint.restore_best(newest.model)


def test_one_process_of_several_restores_the_best_once_it_is_alone(
    tmp_path, monkeypatch
):
    mine = recipe(monitor="score", patience=1, best="restore")
    expected = run(tmp_path, mine)
    assert expected.score == expected.history["val_accuracy"][1]
    # Such as the first of two.
    monkeypatch.setattr(training.run, "rank_and_world_size", lambda: (0, 2))
    with pytest.warns(UserWarning, match=r"last epoch, as several processes"):
        actual = run(tmp_path, mine)
    assert actual.score == expected.history["val_accuracy"][-1]


def test_what_is_better():
    def rows(values, **options):
        best = BestEpoch("x/y", **options)
        best.set_model(keras.Sequential())
        best_rows = []
        for epoch, value in enumerate(values):
            best.on_epoch_begin(epoch)
            best.on_epoch_end(epoch, {} if value is None else {"x/y": value})
            best_rows.append(best.row)
            # A checkpoint does the same.
            state, best = best.get_state(), BestEpoch("x/y", **options)
            best.set_model(keras.Sequential())
            best.set_state(state)
        return best_rows

    nan = float("nan")
    assert rows([nan, 1, nan, 2, None, 1]) == [None, 1, 1, 3, 3, 3]
    assert rows([2, 3, 1], mode="min") == [0, 0, 2]
    assert BestEpoch("val_loss").mode == "min"
    assert BestEpoch("val_accuracy").mode == "max"


@pytest.mark.parametrize("monitor", ["few_shot/10_sht", "score/nan"])
def test_a_run_without_a_best_epoch_says_so(tmp_path, monitor):
    class Nan(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score/nan"] = float("nan")

    mine = recipe(monitor=monitor, best="restore", epochs=2)
    message = f"none has a number for monitor='{monitor}'"
    with (
        pytest.warns(UserWarning, match=message),
        pytest.warns(UserWarning, match="last epoch: there is no best checkpoint"),
    ):
        actual = run(tmp_path, mine, Nan())
    assert actual.score == actual.history["val_accuracy"][-1]


def test_a_metric_that_never_comes_is_named():
    with pytest.raises(ValueError, match=r"'val_loss'\]; received: monitor='score'"):
        train(recipe(monitor="score", patience=1), verbose=0)


def test_a_schedule_may_end_before_the_run():
    mine = recipe(schedule_steps=20, final_learning_rate=1e-4)
    rates = [float(mine.learning_rate(7)(step)) for step in (0, 10, 20, 41)]
    np.testing.assert_allclose(rates, [1e-2, 5.05e-3, 1e-4, 1e-4], rtol=1e-5)


# Longer runs


@pytest.mark.parametrize(
    ("short", "long"),
    [({"decay": "rsqrt"}, {}), ({"final_learning_rate": 1e-3}, {"schedule_steps": 14})],
)
def test_a_longer_run_is_the_one_that_had_been_longer(tmp_path, capsys, short, long):
    short = {"epochs": 2, **short}
    run(tmp_path, recipe(**short))
    mine = recipe(**{**short, **long, "epochs": 3})
    refuses(r"epochs=3 \(there 2\).*or extend the run", run, tmp_path, mine)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*learning rate goes.*")
        # Killed in between.
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, mine, runs.Ends(5), extend=True)
        actual = run(tmp_path, mine, extend=True, verbose=2)
    # The newest checkpoint, of every third step, before the end at the 19th.
    assert "Resuming at step 18, in epoch 3\n" in capsys.readouterr().err
    assert_same(actual, run(tmp_path / "longer", mine))
    assert len(actual.history["loss"]) == 3
    # It is its own recipe's now.
    assert run(tmp_path, mine, runs.Ends(0)).history == actual.history
    with pytest.raises(ValueError, match="at least 21 steps to extend; rec"):
        run(tmp_path, recipe(**short), extend=True)
    with pytest.raises(ValueError, match=r"learning_rate=0\.5 "):
        run(tmp_path, runs.changed(mine, epochs=4, learning_rate=0.5), extend=True)


def test_a_schedule_that_begins_again_is_told(tmp_path):
    run(tmp_path, recipe(epochs=2))
    message = r"step 14 the learning rate goes from 0 to 0\.00\d+, .*21 steps.*steps=14"
    with pytest.warns(UserWarning, match=message):
        actual = run(tmp_path, recipe(epochs=3), extend=True)
    assert len(actual.history["val_loss"]) == 3
    assert int(actual.model.optimizer.iterations) == 21


def test_a_run_that_ended_within_an_epoch_goes_on(tmp_path):
    settings = {"decay": "constant", "epochs": None}
    run(tmp_path, recipe(steps=9, **settings))
    mine = recipe(steps=14, **settings)
    actual = run(tmp_path, mine, extend=True)
    whole = train(mine, verbose=0)
    runs.assert_same_arrays(actual, whole)
    # Both parts of the epoch that was cut have a row of their own.
    assert len(actual.history["loss"]) == 3
    assert actual.history["val_loss"][-1] == whole.history["val_loss"][-1]


def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path):
    run(tmp_path, recipe(monitor="score", patience=1))
    mine = recipe(monitor="score", patience=2)
    actual = run(tmp_path, mine, extend=True)
    assert_same(actual, run(tmp_path / "whole", mine))
    assert len(actual.history["score"]) == 4
