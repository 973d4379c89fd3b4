"""Checkpoints by Orbax are whole or not there, and are what was written, too."""

import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training import (
    LocalStorage,
    OrbaxStorage,
    Retention,
    agreement,
    orbax_storage,
)
from keras_moe.training.tensor_writer import NonFiniteValues
from tests.training.test_checkpoints import assert_same, cut, flip, names, variables

ocp = pytest.importorskip("orbax.checkpoint")
backend_free = pytest.mark.backend_free


def save(folder, step, seed=0, **retention):
    groups = {"model": variables(seed), "optimizer": variables(seed + 50)[:2]}
    state = {"seed": seed}
    return OrbaxStorage(folder).save(step, groups, state, Retention(**retention))


def files_of(path):
    return sorted(x for x in Path(path).rglob("*") if x.is_file())


@pytest.mark.every_backend
def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 5, seed=1)
    actual = training.find_checkpoint(tmp_path)
    assert isinstance(actual.storage, OrbaxStorage)
    assert (actual.step, actual.state) == (5, {"seed": 1})
    made = variables(99)
    # One group alone, and of the other dtype.
    training.restore_checkpoint(actual, {"model": made})
    assert_same(made, variables(1))
    wide = keras.Variable(np.zeros((3, 5)), dtype="bfloat16", name="w0")
    training.restore_checkpoint(actual, {"optimizer": [wide, variables(0)[1]]})
    expected = keras.ops.cast(variables(51)[0].value, "bfloat16")
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(wide.value), keras.ops.convert_to_numpy(expected)
    )


def run(folder, epochs, end_at=None):
    """A run of two steps in an epoch, which may end before a step."""

    class Ends(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_begin(self, batch, logs=None):
            if self.seen == end_at:
                raise KeyboardInterrupt
            self.seen += 1

    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,)), keras.layers.Dropout(0.5, seed=1)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    checkpoint = training.RunCheckpoint(OrbaxStorage(folder), 2, every=1)
    step = checkpoint.restore(model)
    x = np.random.default_rng(0).normal(size=(4, 2))
    model.fit(
        x,
        x[:, :1],
        batch_size=2,
        shuffle=False,
        epochs=epochs,
        initial_epoch=step // 2,
        callbacks=checkpoint.around([Ends()]),
        verbose=0,
    )
    return model, checkpoint.history


@backend_free
def test_a_run_goes_on_from_it(tmp_path):
    expected, history = run(tmp_path / "whole", 3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "ended", 3, end_at=2)
    actual, again = run(tmp_path / "ended", 3)
    assert again == history
    assert_same(actual.variables, expected.variables)


@backend_free
def test_every_file_is_compared(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, seed=step)
    path = tmp_path / "step-00000002"
    whole = tmp_path / "whole"
    shutil.copytree(path, whole)
    files = [file.relative_to(path) for file in files_of(path)]
    assert len(files) > 10
    for file in files:
        for damage in (flip, cut, Path.unlink):
            if damage is not Path.unlink and not (path / file).stat().st_size:
                continue
            damage(path / file)
            with pytest.warns(UserWarning, match=r"step-00000002 \(.*00001 is whole"):
                actual = training.find_checkpoint(tmp_path)
            assert actual.step == 1, file
            shutil.copyfile(whole / file, path / file)
    # Files that the manifest does not name are refused, and so are links.
    (path / "further").write_text("")
    with pytest.raises(ValueError, match="does not name further"):
        training.open_checkpoint(path)
    (path / "further").unlink()
    os.rename(path / files[0], tmp_path / "moved")
    (path / files[0]).symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="expected no link"):
        training.open_checkpoint(path)
    os.replace(tmp_path / "moved", path / files[0])
    assert training.open_checkpoint(path).step == 2
    # A corrupt one does not stand in the way.
    cut(path / "state.json")
    save(tmp_path, 2, seed=7)
    assert training.find_checkpoint(tmp_path).state == {"seed": 7}


@backend_free
def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    save(tmp_path, 1)
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000007")
    with pytest.raises(ValueError, match=r"manifest\.json is of step 1"):
        training.find_checkpoint(tmp_path)


@backend_free
def test_the_last_ones_are_kept(tmp_path):
    for step in range(6):
        save(tmp_path, step, newest=2, every=3, steps=(1,))
    kept = [0, 1, 3, 4, 5]
    assert names(tmp_path) == [f"step-0000000{step}" for step in kept]
    save(tmp_path, 4, seed=7, newest=1)
    assert names(tmp_path) == ["step-00000004"]


@backend_free
@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_what_was_never_finished_is_never_taken(tmp_path, monkeypatch, group):
    run, disk = tmp_path / "run", tmp_path / "disk"
    save(run, 1, seed=1)

    def interrupted(*args):
        # A process that is killed here leaves this behind.
        shutil.copytree(run, disk, dirs_exist_ok=True)
        raise KeyboardInterrupt

    # Before a group's arrays are there, and before the manifest is.
    def write_until(self, directory, *args, **kwargs):
        if directory.name == f"arrays-{group}":
            interrupted()
        return write(self, directory, *args, **kwargs)

    write = ocp.Checkpointer.save
    with monkeypatch.context() as patched:
        patched.setattr(ocp.Checkpointer, "save", write_until)
        with pytest.raises(KeyboardInterrupt):
            save(run, 2, seed=2)
    with monkeypatch.context() as patched:
        patched.setattr(OrbaxStorage, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(run, 3, seed=3)
    # A process that lives long enough cleans up.
    assert names(run) == ["step-00000001"]
    tmp_path = disk
    assert names(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3)]
    with pytest.warns(UserWarning, match="never finished"):
        assert training.find_checkpoint(tmp_path).step == 1
    training.clean_checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    training.clean_checkpoints(tmp_path, everything=True)
    assert names(tmp_path) == []


@backend_free
def test_the_first_that_was_never_finished_leaves_nothing_behind(tmp_path):
    (tmp_path / "step-00000001" / "arrays-model.orbax-checkpoint-tmp").mkdir(
        parents=True
    )
    checkpoint = training.RunCheckpoint(tmp_path, 2)
    assert isinstance(checkpoint.storage, OrbaxStorage)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert checkpoint.restore(model) == 0
    assert names(tmp_path) == []


@backend_free
def test_a_failed_write_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    save(tmp_path, 1, seed=1)

    def full(self, *arguments, **options):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(OSError, match="could not be written: RESOURCE_EXHAUSTED"):
        save(tmp_path, 2, seed=2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]

    def no_text(path, text):
        raise OSError("No space left on device")

    monkeypatch.setattr(orbax_storage, "_write_text", no_text)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, seed=2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert training.find_checkpoint(tmp_path).state == {"seed": 1}


@backend_free
def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    save(tmp_path, 1)
    bad = keras.Variable(np.full((3,), np.nan), dtype="float32")
    with pytest.raises(NonFiniteValues, match="NaN or Inf in model/00000"):
        OrbaxStorage(tmp_path).save(2, {"model": [bad]}, {})
    assert names(tmp_path) == ["step-00000001"]


@backend_free
def test_other_variables_are_refused(tmp_path):
    save(tmp_path, 1)
    checkpoint = training.find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"Expected 1 variables of 'model' .*: 5"):
        training.restore_checkpoint(checkpoint, {"model": variables()[:1]})
    with pytest.raises(ValueError, match=r"Expected shape \(3, 5\)"):
        training.restore_checkpoint(checkpoint, {"model": [variables()[0]] * 5})


@backend_free
def test_the_storage_of_a_folder(tmp_path, monkeypatch):
    for name in ("gs://bucket/run", Path("gs://bucket/run")):
        storage = training.new_storage(name)
        assert isinstance(storage, OrbaxStorage)
        assert os.fspath(storage.path_of(3)) == "gs://bucket/run/step-00000003"
    assert isinstance(training.new_storage(tmp_path), LocalStorage)
    # Several processes that share a model, unless the folder has another format.
    monkeypatch.setattr(agreement, "process_shard", lambda: (0, 2))
    kernels = "keras_moe.ops.kernels.sharded_arrays_jax"
    monkeypatch.setattr(f"{kernels}.exchange", lambda content: [content] * 2)
    assert isinstance(training.new_storage(tmp_path), LocalStorage)
    monkeypatch.setattr(keras.distribution, "distribution", lambda: "a distribution")
    assert isinstance(training.new_storage(tmp_path), OrbaxStorage)
    LocalStorage(tmp_path / "local").save(1, {}, {})
    assert isinstance(training.new_storage(tmp_path / "local"), LocalStorage)
    # Killed once the first checkpoint's folder was made, and nothing in it.
    (tmp_path / "killed" / "step-00000001").mkdir(parents=True)
    assert isinstance(training.new_storage(tmp_path / "killed"), OrbaxStorage)
    monkeypatch.undo()
    save(tmp_path / "orbax", 1)
    assert isinstance(training.new_storage(tmp_path / "orbax"), OrbaxStorage)


@backend_free
def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"keras-moe\[orbax\]"):
        training.new_storage("gs://bucket/run")
