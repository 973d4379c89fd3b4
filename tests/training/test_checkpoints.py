"""Checkpoints are whole or not there, and are what was written, in both formats."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe._files import FolderInUse
from keras_moe.training import _checkpoint_files as checkpoint_files
from keras_moe.training import checkpoints
from tests.compare import assert_same, to_numpy
from tests.disk import files_up_to
from tests.refusals import refuses
from tests.training.runs import Draws, Ends


@pytest.fixture
def by_orbax(monkeypatch):
    """Checkpoints are written as those of several processes are."""
    pytest.importorskip("orbax.checkpoint")
    write_orbax = checkpoint_files.write_orbax
    monkeypatch.setattr(checkpoint_files, "write_safetensors", write_orbax)


@pytest.fixture(params=["safetensors", "orbax"])
def kind(request):
    """Each of the two formats."""
    if request.param == "orbax":
        request.getfixturevalue("by_orbax")
    return request.param


def variables(seed=0):
    draw = np.random.default_rng(seed)
    shapes = {"float32": (3, 5), "float16": (), "bfloat16": (7,), "int32": (0, 2)}
    made = []
    for i, (dtype, shape) in enumerate(shapes.items()):
        options = {"dtype": dtype, "trainable": False, "name": f"w{i}"}
        made.append(keras.Variable(draw.normal(size=shape), **options))
    return [*made, keras.Variable(seed, dtype="int32", trainable=False)]


def save(folder, step, seed=0, **options):
    groups = {"model": variables(seed), "optimizer": variables(seed + 50)[:2]}
    return training.save_checkpoint(folder, step, groups, {"seed": seed}, **options)


def restored(checkpoint):
    made = variables(99)
    checkpoint.restore({"model": made})
    return made


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.every_backend
def test_what_is_saved_comes_back(tmp_path, kind):
    assert training.find_checkpoint(tmp_path) is None
    save(tmp_path, 5, seed=1)
    actual = training.find_checkpoint(tmp_path)
    assert (actual.step, actual.state) == (5, {"seed": 1})
    assert_same(restored(actual), variables(1))
    assert actual.variables["model"][2].dtype == "bfloat16"
    # One group alone, and of another dtype.
    wide = keras.Variable(np.zeros((3, 5)), dtype="bfloat16", name="w0")
    actual.restore({"optimizer": [wide, variables(0)[1]]})
    expected = keras.ops.cast(variables(51)[0].value, "bfloat16")
    np.testing.assert_array_equal(to_numpy(wide.value), to_numpy(expected))
    assert (checkpoint_files.is_orbax(actual.path)) == (kind == "orbax")


def test_the_newest_and_chosen_ones_are_kept(tmp_path, kind):
    for step in range(6):
        save(tmp_path, step, keep=2, keep_every=3, keep_steps=(1,))
    assert names(tmp_path) == [f"step-0000000{step}" for step in (0, 1, 3, 4, 5)]
    # A run that went on from an older one comes to the same step again.
    save(tmp_path, 4, seed=7, keep=1)
    assert names(tmp_path) == ["step-00000004"]
    assert training.find_checkpoint(tmp_path).state == {"seed": 7}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def writes(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(("name", "damage"), [
    ("model.safetensors", flip),
    ("optimizer.safetensors", cut),
    ("state.json", Path.unlink),
    ("state.json", writes("[" * 100_000)),
    ("state.json", writes('{"step": 3, "state": {}, "variables": {}}')),
])  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, name, damage):
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    damage(tmp_path / "step-00000003" / name)
    refuses(r"step-00000003 \(", training.open_checkpoint, tmp_path / "step-00000003")
    with pytest.warns(UserWarning, match=r"Skips checkpoints: .*step-00000003 \("):
        actual = training.find_checkpoint(tmp_path)
    assert actual.step == 2
    assert_same(restored(actual), variables(2))
    # A damaged one does not stand in the way.
    save(tmp_path, 3, seed=4)
    assert training.find_checkpoint(tmp_path).state == {"seed": 4}


def test_an_unfinished_checkpoint_of_orbax_is_skipped(tmp_path, by_orbax):
    for step in (1, 2):
        save(tmp_path, step, seed=step)
    (tmp_path / "step-00000002" / "_CHECKPOINT_METADATA").unlink()
    with pytest.warns(UserWarning, match=r"Skips checkpoints: .*step-00000002 \("):
        assert training.find_checkpoint(tmp_path).step == 1
    shutil.rmtree(tmp_path / "step-00000001" / "state")
    refuses("Remove them to start over", training.find_checkpoint, tmp_path)


def test_an_edited_state_is_skipped(tmp_path, kind):
    save(tmp_path, 1, seed=1)
    path = save(tmp_path, 2, seed=2)
    (file,) = [x for x in (path / "state.json", path / "state/data.json") if x.exists()]
    whole = json.loads(file.read_text())
    for edit in (
        {"state": {"seed": 2, "finished": True}}, {"state": {"seed": 1}},
        {"step": "2"}, {"more": 1}, {"state_sha256": None},
    ):  # fmt: skip
        file.write_text(json.dumps({**whole, **edit}))
        message = r"Skips checkpoints: .*step-00000002 \(.*expected the state that was"
        with pytest.warns(UserWarning, match=message):
            assert training.find_checkpoint(tmp_path).state == {"seed": 1}
    # What it says counts, and not how.
    file.write_text(json.dumps(dict(reversed(whole.items())), indent=1))
    assert training.find_checkpoint(tmp_path).state == {"seed": 2}


def test_a_link_to_a_checkpoint_is_skipped_unless_it_is_asked_for(tmp_path):
    run = tmp_path / "run"
    other = save(tmp_path / "other", 2, seed=2)
    save(run, 1, seed=1)
    (run / "step-00000002").symlink_to(other)
    with pytest.warns(UserWarning, match=r"step-00000002 \(.*to stay within .*run;"):
        assert training.find_checkpoint(run).state == {"seed": 1}
    assert training.open_checkpoint(run / "step-00000002").state == {"seed": 2}
    # The user's own path may be a link.
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert training.find_checkpoint(tmp_path / "link").state == {"seed": 2}


@pytest.mark.parametrize("group", ["../outside", "in/outside", "link", ".."])
def test_names_outside_the_folder_are_refused(tmp_path, group):
    path = save(tmp_path, 1)
    (path / "link.safetensors").symlink_to(path / "model.safetensors")
    for folder in (tmp_path, path / "in"):
        folder.mkdir(exist_ok=True)
        shutil.copy(path / "model.safetensors", folder / "outside.safetensors")
    content = json.loads((path / "state.json").read_text())
    content["variables"][group] = content["variables"]["model"]
    # An attacker would write matching checksums.
    content["sha256"][f"{group}.safetensors"] = content["sha256"]["model.safetensors"]
    (path / "state.json").write_text(json.dumps(checkpoint_files.signed(content)))
    refuses(f"no link; received: '{group}.safetensors'", training.open_checkpoint, path)


@pytest.mark.parametrize("failing", ["os.fsync", "os.rename", "save_file", "orbax"])
def test_a_failed_write_leaves_the_checkpoints_before(
    request, tmp_path, monkeypatch, failing
):
    error, message = OSError(errno.ENOSPC, "No space left on device"), "No space left"
    if failing == "save_file":
        failing = "keras_moe.training._checkpoint_files.save_file"
    elif failing == "orbax":
        request.getfixturevalue("by_orbax")
        failing = "orbax.checkpoint.v1.save_checkpointables"
        error = ValueError("EXHAUSTED: x")
        message = "could not be written: EXHAUSTED"
    save(tmp_path, 1, seed=1)

    def full(*arguments, **options):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(failing, full)
        with pytest.raises(OSError, match=message):
            save(tmp_path, 2, seed=2)
    assert names(tmp_path) == ["step-00000001"]
    assert_same(restored(training.find_checkpoint(tmp_path)), variables(1))


def test_a_run_goes_on_when_the_disk_is_full(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(20_000)])
    model.compile("sgd", "mse")
    checkpoint = training.RunCheckpoint(tmp_path, steps_per_epoch=2, every=1, keep=9)
    checkpoint.restore(model)
    data = np.ones((4, 4)), np.ones((4, 20_000))
    options = {"batch_size": 2, "epochs": 2, "callbacks": checkpoint.around([])}
    # 400 kB of weights: no file may be as large. In the middle of the run a warning
    # each, at its end an error.
    message = r"too large.*the last good one is None\. The run goes on"
    with (
        files_up_to(200_000),
        pytest.warns(UserWarning, match=message) as warned,
        pytest.raises(OSError, match=r"The checkpoint of step 4.*too large"),
    ):
        model.fit(*data, **options, verbose=0)
    assert sum("too large" in str(x.message) for x in warned) == 3
    assert names(tmp_path) == []


def test_what_interrupted_writes_left_is_deleted_at_the_next_start(tmp_path):
    kept, run = tmp_path / "kept", tmp_path / "run"
    save(kept, 1)
    save(run, 1)
    halves = (".step-00000002.0123abcd.partial", "step-00000002.orbax-checkpoint-tmp")
    for name in halves:
        (run / name).mkdir()
        (run / name / "model.safetensors").write_bytes(b"half")
    (run / ".step-00000003.0123abcd.partial").symlink_to(kept)
    (run / ".step-00000004.0123abcd.partial").write_text("")
    # Killed while it was replaced, and after that.
    shutil.copytree(save(run, 5), run / ".step-00000005.previous")
    os.rename(save(run, 6), run / ".step-00000006.previous")
    assert training.find_checkpoint(run).step == 5
    checkpoints.clean_folder(run)
    assert names(run) == ["step-00000001", "step-00000005", "step-00000006"]
    assert training.find_checkpoint(run).step == 6
    checkpoints.clean_folder(run, everything=True)
    assert names(run) == []
    assert names(kept) == ["step-00000001"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    save(tmp_path, 1)
    bad = keras.Variable(np.full((3,), value), dtype="float32", name="bad")
    with pytest.raises(training.NonFiniteLoss, match="NaN or Inf in model/bad"):
        training.save_checkpoint(tmp_path, 2, {"model": [bad]}, {})
    assert names(tmp_path) == ["step-00000001"]


def test_other_variables_are_refused(tmp_path):
    save(tmp_path, 1)
    checkpoint = training.find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"Expected 1 variables of 'model' .*: 5"):
        checkpoint.restore({"model": variables()[:1]})
    with pytest.raises(ValueError, match=r"variables of 'other' .*: None"):
        checkpoint.restore({"other": variables()})
    with pytest.raises(ValueError, match=r"Expected shape \(3, 5\)"):
        checkpoint.restore({"model": [variables()[0]] * 5})
    for other in (
        keras.Variable(np.zeros((3, 5), "int32"), trainable=False, name="w0"),
        keras.Variable(np.zeros((3, 5), "float32"), name="bias"),
    ):
        with pytest.raises(ValueError, match=f"of {other.path} in .*w0"):
            checkpoint.restore({"model": [other, *variables()[1:]]})
    layers = [keras.layers.Dense(3, name=name) for name in ("head", "pre_logits")]
    for layer in layers:
        layer.build((None, 3))
    groups = [{"model": [x.kernel, y.kernel]} for x, y in (layers, layers[::-1])]
    training.save_checkpoint(tmp_path, 1, groups[0], {})
    checkpoint = training.find_checkpoint(tmp_path)
    checkpoint.restore(groups[0])
    refuses(r"of pre_logits/kernel in .*head/kernel", checkpoint.restore, groups[1])


def test_remote_folders_are_read_by_orbax_and_not_locked(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    for name in ("gs://bucket/run", Path("gs://bucket/run")):
        path = checkpoints.step_folder(name, 3)
        assert os.fspath(path) == "gs://bucket/run/step-00000003"
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"\[orbax\]"):
        training.find_checkpoint("gs://bucket/run")
    monkeypatch.chdir(tmp_path)
    with training.run_lock("gs://bucket/run"):
        assert names(tmp_path) == []


# Runs


def run(folder, epochs, *callbacks, **settings):
    """A run of two steps in an epoch."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,)), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    checkpoint = training.RunCheckpoint(folder, 2, every=1, settings=settings)
    step = checkpoint.restore(model)
    x = np.random.default_rng(0).normal(size=(4, 2))
    options = {"batch_size": 2, "verbose": 0, "epochs": epochs}
    options |= {"callbacks": checkpoint.around(callbacks), "initial_epoch": step // 2}
    model.fit(x, x[:, :1], **options)
    return model, checkpoint.history


@pytest.mark.every_backend
def test_a_run_resumes_exactly(tmp_path, kind):
    expected, history = run(tmp_path / "whole", 3, Draws())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "ended", 3, Draws(), Ends(2))
    actual, again = run(tmp_path / "ended", 3, Draws())
    assert len(history["drawn"]) == 3
    assert again == history
    assert_same(actual.variables, expected.variables)


def test_your_own_settings_may_have_any_names(tmp_path):
    for epochs in (1, 2):
        _, history = run(tmp_path, epochs, preset="vmoe_b16", note="mine")
        assert len(history["loss"]) == epochs
    with pytest.raises(ValueError, match=r"note='other' \(there 'mine'\)"):
        run(tmp_path, 3, preset="vmoe_b16", note="other")


# Locks

RECIPE = training.load_recipe("mumoe_digits")


def test_a_second_training_is_refused_before_it_touches_the_first(tmp_path):
    folder = tmp_path / "run"
    with training.run_lock(folder):
        (folder / "step-00000001").mkdir()
        for resume in (True, False):
            message = f"run in {folder} .*; received: process {os.getpid()} on host"
            with pytest.raises(FolderInUse, match=message):
                training.train(RECIPE, checkpoint_dir=folder, resume=resume)
        assert (folder / "step-00000001").exists()
    assert names(folder) == ["step-00000001"]
