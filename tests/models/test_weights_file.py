"""Files of weights: interrupted, and of others who may mean harm."""

import errno
import json
import re

import h5py
import keras
import pytest

from keras_moe import files
from keras_moe.models import weights_file
from keras_moe.models.preset_folder import compare_checksums, compare_preset
from keras_moe.models.weights_file import (
    checked_weights,
    new_hdf5,
    plain_values,
    save_weights,
)

pytestmark = pytest.mark.usefixtures("op_by_op")


@pytest.fixture
def model():
    made = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])
    made.build((None, 8))
    return made


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, model):
    path = tmp_path / "a.weights.h5"
    path.write_bytes(b"older")
    with pytest.raises(KeyError, match="mine"), new_hdf5(path, ()):
        raise KeyError("mine")

    def interrupted(*args, **options):
        (args[1]).write_bytes(b"half")
        raise KeyboardInterrupt("now")

    monkeypatch.setattr(keras.saving, "save_weights", interrupted)
    with pytest.raises(KeyboardInterrupt, match="now"):
        save_weights(model, path)
    assert contents(tmp_path) == {path.name: b"older"}


def test_a_declared_shape_takes_no_memory(tmp_path, model):
    """A million rows of a million, of which no value is in the file."""
    path = tmp_path / "a.weights.h5"
    save_weights(model, path)
    with h5py.File(path, "r+") as file:
        name = "layers/dense/vars/0"
        del file[name]
        file.create_dataset(name, (10**6, 10**6), "float32", chunks=(1000, 1000))
    message = re.escape(f"HDF5 file at {path}; received: ValueError: Not allowed: ")
    with pytest.raises(ValueError, match=message), checked_weights(path):
        keras.saving.load_weights(model, path)
    with h5py.File(path) as file, pytest.raises(ValueError, match=r"declares 3.64 TB"):
        plain_values(file)


# Shards

SIZE = 3e-7


@pytest.fixture
def index(tmp_path, model):
    """The index of weights in two shards."""
    path = tmp_path / "x.weights.json"
    save_weights(model, path, max_shard_size=SIZE)
    assert len(list(tmp_path.glob("x_*.weights.h5"))) == 2
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failed_save_of_shards_changes_none_of_the_files(
    tmp_path, monkeypatch, model, index, call
):
    """The disk is full, or fails, at a shard or at the index."""
    before = contents(tmp_path)
    model.set_weights([x + 1 for x in model.get_weights()])
    calls = []

    def sync(path):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(weights_file, "sync_file", sync)
    with pytest.raises(OSError, match="full"):
        save_weights(model, index, max_shard_size=SIZE)
    assert contents(tmp_path) == before


def test_the_index_that_cannot_take_its_place_leaves_the_shards(
    tmp_path, monkeypatch, model, index
):
    before = contents(tmp_path)
    model.set_weights([x + 1 for x in model.get_weights()])
    replace = files.os.replace

    def fail(part, path):
        if str(path).endswith(".json"):
            raise OSError(errno.ENOSPC, "full")
        replace(part, path)

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        save_weights(model, index, max_shard_size=SIZE)
    assert contents(tmp_path) == before


def test_shards_of_two_saves_are_not_mixed(tmp_path, model, index):
    shard = tmp_path / "x_00001.weights.h5"
    older = shard.read_bytes()
    model.set_weights([x + 1 for x in model.get_weights()])
    save_weights(model, index, max_shard_size=SIZE)
    keras.saving.load_weights(model, index)
    assert [x.name for x in compare_checksums(index)][1:] == [
        "x_00000.weights.h5",
        "x_00001.weights.h5",
    ]
    shard.write_bytes(older)
    with pytest.raises(ValueError, match=re.escape(f"{shard} of SHA-256")):
        compare_checksums(index)


@pytest.mark.parametrize(
    "name", ["../x.weights.h5", "/x.weights.h5", 5, ["a.weights.h5", 3], [["a"]], None,
             "a\0.weights.h5", "..", "x.json"],
)  # fmt: skip
def test_shards_of_other_names_are_refused(index, name):
    content = json.loads(index.read_text())
    content["weight_map"] = {"/layers": name}
    for path in (index, index.with_name("model.weights.json")):
        path.write_text(json.dumps(content))
        with pytest.raises(
            ValueError, match=re.escape(f"of the same folder in {path}")
        ):
            compare_checksums(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "null", "5", '{"weight_map": []}', "{"]
)
def test_an_index_of_another_kind_is_named(index, text):
    index.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(index))):
        compare_checksums(index)


@pytest.mark.parametrize("sums", ["x", [], None, {}, {"model.weights.h5": 5}])
def test_checksums_of_another_kind_are_not_skipped(tmp_path, sums):
    path, metadata = tmp_path / "model.weights.h5", tmp_path / "metadata.json"
    path.write_bytes(b"weights")
    (tmp_path / "soup.weights.h5").write_bytes(b"weights")
    metadata.write_text(json.dumps({"sha256": sums}))
    with pytest.raises(ValueError, match=re.escape(f'in "sha256" of {metadata}')):
        compare_checksums(path)
    # The user's own file beside it has none.
    compare_checksums(tmp_path / "soup.weights.h5")
    metadata.write_text("{}")
    compare_preset(tmp_path)
