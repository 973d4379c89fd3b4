"""Checkpoints are whole or not there, and are what was written."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training import tensor_writer
from keras_moe.training.array_pieces import assign_pieces, opened_pieces

ROOT = Path(__file__).resolve().parents[2]
to_numpy = keras.ops.convert_to_numpy
backend_free = pytest.mark.backend_free


def variables(seed=0):
    draw = np.random.default_rng(seed)
    made = [
        keras.Variable(
            draw.normal(size=shape), dtype=dtype, trainable=False, name=f"w{i}"
        )
        for i, (shape, dtype) in enumerate(
            [
                ((3, 5), "float32"),
                ((), "float32"),
                ((7,), "bfloat16"),
                ((0, 2), "int32"),
            ]
        )
    ]
    return [*made, keras.Variable(seed, dtype="int32", trainable=False)]


def save(folder, step, seed=0, keep=3):
    state = {"seed": seed}
    return training.save_checkpoint(
        folder, step, {"model": variables(seed)}, state, keep
    )


def restored(checkpoint):
    made = variables(99)
    training.restore_checkpoint(checkpoint, {"model": made})
    return made


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(a.value), to_numpy(b.value))


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.every_backend
def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 5, seed=1)
    actual = training.find_checkpoint(tmp_path)
    assert (actual.step, actual.state) == (5, {"seed": 1})
    assert_same(restored(actual), variables(1))
    assert actual.variables["model"][2]["dtype"] == "bfloat16"


@backend_free
def test_the_arrays_are_a_safetensors_file(tmp_path):
    from safetensors.numpy import load_file

    path = save(tmp_path, 5, seed=1)
    (file,) = path.glob("arrays-*.safetensors")
    actual = load_file(file)
    key = next(name for name in actual if name.startswith("model/00000/"))
    np.testing.assert_array_equal(actual[key], to_numpy(variables(1)[0].value))


@backend_free
def test_the_last_ones_are_kept(tmp_path):
    for step in range(5):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    # A run that went on from an older one comes to the same step again.
    save(tmp_path, 3, seed=7, keep=2)
    assert names(tmp_path) == ["step-00000003"]
    assert training.find_checkpoint(tmp_path).state == {"seed": 7}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@backend_free
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["arrays", "state.json", "manifest.json"])
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(tmp_path, name, damage):
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    (file,) = (tmp_path / "step-00000003").glob(f"{name}*")
    damage(file)
    with pytest.warns(UserWarning, match=r"step-00000003 \(.*step-00000002 is whole"):
        actual = training.find_checkpoint(tmp_path)
    assert actual.step == 2
    assert_same(restored(actual), variables(2))
    # A corrupt one does not stand in the way.
    save(tmp_path, 3, seed=4)
    assert training.find_checkpoint(tmp_path).state == {"seed": 4}


@backend_free
@pytest.mark.parametrize(
    "name",
    ["../outside.json", "{folder}/outside.json", "in/outside.json", "link", "..", ""],
)
def test_names_outside_the_folder_are_refused(tmp_path, name):
    path = save(tmp_path, 1)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (path / "link").symlink_to(outside)
    (path / "in").mkdir()
    (path / "in" / "outside.json").write_text("{}")
    # An attacker would write matching checksums.
    digest = hashlib.sha256(b"{}").hexdigest()
    name = name.format(folder=tmp_path)
    rewritten(path, {name: {"sha256": digest, "bytes": 2}})
    with pytest.raises(ValueError, match=f"no link; received: {name!r}"):
        training.open_checkpoint(path)
    # Without it all is right.
    rewritten(path, {})
    training.open_checkpoint(path)


@backend_free
def test_files_of_a_checkpoint_are_no_links(tmp_path):
    path = save(tmp_path, 1)
    for name in [file.name for file in path.iterdir()]:
        os.rename(path / name, tmp_path / "moved")
        (path / name).symlink_to(tmp_path / "moved")
        with pytest.raises(ValueError, match=f"no link; received: '{name}'"):
            training.open_checkpoint(path)
        os.replace(tmp_path / "moved", path / name)
    training.open_checkpoint(path)


@backend_free
def test_the_state_is_among_the_files_that_are_compared(tmp_path):
    path = save(tmp_path, 1)
    rewritten(path, {}, without="state.json")
    with pytest.raises(ValueError, match=r"no state\.json"):
        training.open_checkpoint(path)


def rewritten(path, further, without=None):
    """A manifest with other files, whose own checksum is right."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"] = {
        name: entry
        for name, entry in manifest["files"].items()
        if name != without and (name.startswith("arrays-") or name == "state.json")
    } | further
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def signed(manifest):
    """The text of a manifest whose own checksum is right."""
    text = json.dumps(manifest, sort_keys=True)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**manifest, "sha256": sha256})


MANIFEST = {"format": 1, "step": 2, "files": {}}


@backend_free
@pytest.mark.parametrize(
    "text",
    [
        "null", "5", '"abc"', "[" * 100_000, "{}",
        signed({**MANIFEST, "files": "state.json"}),
        signed({**MANIFEST, "files": {"state.json": 5}}),
        signed({**MANIFEST, "step": [2]}),
    ],
)  # fmt: skip
def test_manifests_of_another_kind_do_not_hide_older_checkpoints(tmp_path, text):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"step-00000002 \(manifest\.json"):
        training.open_checkpoint(path)
    with pytest.warns(UserWarning, match="step-00000001 is whole"):
        assert training.find_checkpoint(tmp_path).step == 1


@backend_free
def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    os.rename(save(tmp_path, 1), tmp_path / "step-00000007")
    with pytest.raises(ValueError, match=r"manifest\.json is of step 1"):
        training.find_checkpoint(tmp_path)
    # Elsewhere it may have any name.
    os.rename(tmp_path / "step-00000007", tmp_path / "best")
    assert training.open_checkpoint(tmp_path / "best").step == 1


@backend_free
@pytest.mark.parametrize(
    "text",
    [
        "null", "[" * 100_000, '{"state": {}, "variables": [1]}',
        '{"state": {}, "variables": {"model": [5]}}',
    ],
)  # fmt: skip
def test_states_of_another_kind_are_refused(tmp_path, text):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    rewritten(path, {"state.json": {"sha256": sha256, "bytes": len(text)}})
    with pytest.raises(ValueError, match=r"step-00000001 \(state\.json"):
        training.find_checkpoint(tmp_path)


@backend_free
def test_if_all_are_corrupt_nothing_begins_anew_by_itself(tmp_path):
    assert training.find_checkpoint(tmp_path) is None
    cut(save(tmp_path, 1) / "state.json")
    with pytest.raises(ValueError, match=r"step-00000001 \(state.json is not what"):
        training.find_checkpoint(tmp_path)


@backend_free
@pytest.mark.parametrize("failing", ["os.fsync", "os.rename", "write", "json"])
def test_a_failed_write_leaves_the_checkpoints_before(tmp_path, monkeypatch, failing):
    save(tmp_path, 1, seed=1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "write":
        monkeypatch.setattr("keras_moe.training.local_storage.write_tensors", full)
    elif failing == "json":
        monkeypatch.setattr("keras_moe.training.local_storage._write", full)
    else:
        monkeypatch.setattr(failing, full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, seed=2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert_same(restored(training.find_checkpoint(tmp_path)), variables(1))
    save(tmp_path, 2, seed=2)
    assert training.find_checkpoint(tmp_path).step == 2


LIMITED = """
import resource, signal, sys, warnings
# Keras imports it to look for its kinds of shapes: two seconds for nothing.
sys.modules["tensorflow"] = None
import keras, numpy as np
from keras_moe import training

folder = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def model(units):
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    made.compile("sgd", "mse")
    return made

def fit(units, folder, steps):
    checkpoint = training.RunCheckpoint(folder, steps_per_epoch=2, every=1, keep=9)
    made = model(units)
    checkpoint.restore(made)
    made.fit(np.ones((4, 4)), np.ones((4, units)), batch_size=2, epochs=2, verbose=0,
             callbacks=checkpoint.around([]))

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    try:
        # 400 kB of weights: no file may be as large.
        fit(20_000, folder, 4)
    except OSError as error:
        print("ERROR", error)
print("WARNINGS", [str(x.message) for x in told if "checkpoint" in str(x.message)])
"""


@backend_free
def test_a_run_goes_on_when_the_disk_is_full(tmp_path):
    save(tmp_path / "other", 1)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # In the middle of the run a warning each, at its end an error.
    assert done.stdout.count("File too large") == 4, done.stdout
    assert "ERROR The checkpoint of step 4" in done.stdout
    assert "there is none. The run goes on" in done.stdout
    assert names(tmp_path / "run") == []


@backend_free
def test_what_was_being_written_is_removed_at_the_next_start(tmp_path):
    save(tmp_path, 1)
    stale = tmp_path / ".writing-step-00000002"
    stale.mkdir()
    (stale / "arrays-00000-of-00001.safetensors").write_bytes(b"half")
    assert training.find_checkpoint(tmp_path).step == 1
    training.clean_checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    training.clean_checkpoints(tmp_path, everything=True)
    assert names(tmp_path) == []


@backend_free
def test_links_and_files_among_the_unfinished_are_removed(tmp_path):
    kept, run = tmp_path / "kept", tmp_path / "run"
    save(kept, 1)
    run.mkdir()
    (run / ".writing-link").symlink_to(kept)
    (run / ".writing-dangling").symlink_to(run / "nowhere")
    (run / ".writing-file").write_text("")
    training.clean_checkpoints(run)
    assert names(run) == []
    assert names(kept) == ["step-00000001"]


@backend_free
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    save(tmp_path, 1)
    bad = keras.Variable(np.full((3,), value), dtype="float32")
    with pytest.raises(
        tensor_writer.NonFiniteValues, match="NaN or Inf in model/00000"
    ):
        training.save_checkpoint(tmp_path, 2, {"model": [bad]}, {})
    assert names(tmp_path) == ["step-00000001"]


@backend_free
def test_other_variables_are_refused(tmp_path):
    save(tmp_path, 1)
    checkpoint = training.find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"Expected 1 variables of 'model' .*: 5"):
        training.restore_checkpoint(checkpoint, {"model": variables()[:1]})
    with pytest.raises(ValueError, match=r"variables of 'other' .*: None"):
        training.restore_checkpoint(checkpoint, {"other": variables()})
    with pytest.raises(ValueError, match=r"Expected shape \(3, 5\)"):
        training.restore_checkpoint(checkpoint, {"model": [variables()[0]] * 5})
    for other in (
        keras.Variable(np.zeros((3, 5), "int32"), trainable=False, name="w0"),
        keras.Variable(np.zeros((3, 5), "float32"), name="bias"),
    ):
        with pytest.raises(ValueError, match=f"of {other.path} in .*w0"):
            training.restore_checkpoint(
                checkpoint, {"model": [other, *variables()[1:]]}
            )


@backend_free
def test_nothing_that_is_read_can_run_code(tmp_path):
    path = save(tmp_path, 1)
    kinds = {file.suffix for file in path.iterdir()}
    assert kinds == {".json", ".safetensors"}


def tensors(**entries):
    """A safetensors file of four floats, with a header of one's own."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@backend_free
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", json.dumps({"a": 1}).encode(), b"\xff" * 200,
        (1 << 60).to_bytes(8, "little") + b"{}",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        tensors(**{"model/0/w@0": {**F32, "data_offsets": [0, 160]}}),
        tensors(**{"model/0/w@0": {**F32, "data_offsets": [-16, 0]}}),
        tensors(**{"model/0/w@0": {**F32, "shape": [2**62, 4]}}),
        tensors(**{"model/0/w@0": {**F32, "dtype": "pickle"}}),
        # Names that are no pieces.
        tensors(w=F32), tensors(**{"model/first/w@0": F32}),
        tensors(**{"model/0/w@zero": F32}),
    ],
    ids=lambda content: content[:24].decode("latin-1"),
)  # fmt: skip
def test_files_of_another_kind_are_refused(tmp_path, content):
    (tmp_path / "arrays.safetensors").write_bytes(content)
    message = r"safetensors file of a checkpoint; received: .*arrays\.safetensors"
    with (
        pytest.raises(ValueError, match=message),
        opened_pieces([tmp_path / "arrays.safetensors"]),
    ):
        pass


@backend_free
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model/0/w@2", "all of a variable"),
        ("model/0/w@-2", "all of a variable"),
        ("model/0/w@0,0", "1 axes"),
        ("model/1/w@0", "all of a variable"),
    ],
)
def test_pieces_that_are_not_the_variable_are_refused(tmp_path, name, message):
    path = training.save_checkpoint(
        tmp_path,
        1,
        {"model": [keras.Variable(np.ones(4), name="w", trainable=False)]},
        {},
    )
    (file,) = path.glob("*.safetensors")
    file.write_bytes(tensors(**{name: F32}))
    entry = {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "bytes": file.stat().st_size,
    }
    rewritten(path, {file.name: entry})
    checkpoint = training.open_checkpoint(path)
    variable = keras.Variable(np.ones(4), name="w", trainable=False)
    with pytest.raises(ValueError, match=f"Expected {message}; received"):
        training.restore_checkpoint(checkpoint, {"model": [variable]})


@backend_free
def test_eight_bit_floats_are_their_bits(tmp_path):
    values = np.array([0.5, -2.0, 448.0], ml_dtypes.float8_e4m3fn)
    tensor = tensor_writer.Tensor(
        "model/00000/w@0", (3,), "float8_e4m3fn", lambda: values
    )
    tensor_writer.write_tensors(tmp_path / "one.safetensors", [tensor])
    variable = keras.Variable(np.zeros(3), dtype="float32", name="w")
    with opened_pieces([tmp_path / "one.safetensors"]) as pieces:
        assign_pieces(variable, pieces["model", 0], "float8_e4m3fn")
    assert to_numpy(variable.value).tolist() == [0.5, -2.0, 448.0]


def small_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@backend_free
def test_a_checkpoint_of_no_run_is_refused_by_a_run(tmp_path):
    model = small_model()
    groups = {"model": model.variables, "optimizer": model.optimizer.variables}
    path = training.save_checkpoint(tmp_path / "run", 3, groups, {"finished": False})
    message = r"RunCheckpoint has written in .*step-00000003; .* without callbacks, h"
    with pytest.raises(ValueError, match=message):
        training.RunCheckpoint(tmp_path / "run", 2).restore(model)
    branch = training.RunCheckpoint(tmp_path / "branch", 2, branch_from=path)
    with pytest.raises(ValueError, match=message):
        branch.restore(model)


@backend_free
def test_a_state_is_json(tmp_path):
    model = small_model()
    with pytest.raises(ValueError, match=r"that JSON can hold; .*state=\{'x': <"):
        training.save_checkpoint(tmp_path, 1, {"m": model.variables}, {"x": object()})
    assert training.find_checkpoint(tmp_path) is None


@backend_free
def test_settings_of_ones_own_may_have_any_names(tmp_path):
    settings = {"preset": "vmoe_b16", "note": "mine"}

    def run(epochs, **changes):
        model = small_model()
        checkpoint = training.RunCheckpoint(
            tmp_path, 1, settings={**settings, **changes}
        )
        step = checkpoint.restore(model)
        x = np.ones((2, 1), "float32")
        options = {"callbacks": checkpoint.around([]), "verbose": 0}
        model.fit(x, x, epochs=epochs, initial_epoch=step, **options)
        return step

    assert [run(1), run(2)] == [0, 1]
    with pytest.raises(ValueError, match=r"note='other' \(there 'mine'\)"):
        run(3, note="other")
