"""Presets and weights are saved whole or not at all, by one process at a time."""

import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.saving import _weights_file
from keras_moe.models.saving._preset_folder import (
    compare_checksums,
    compare_preset,
    staged,
)
from keras_moe.training import greedy_soup
from tests.compare import to_numpy
from tests.forks import run_python
from tests.refusals import refuses
from tests.small_models import classifier, vit

pytestmark = pytest.mark.usefixtures("op_by_op")


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    made = classifier()
    made.output_dense.kernel.assign(np.ones(made.output_dense.kernel.shape))
    return made


@pytest.fixture(scope="module")
def presets(model, tmp_path_factory):
    """A preset in one file, and one in shards."""
    folder = tmp_path_factory.mktemp("saved")
    model.save_to_preset(folder / "whole")
    size = sum(np.prod(x.shape) for x in model.weights) * 4 / 1024**3
    model.save_to_preset(folder / "shards", max_shard_size=float(size) / 2)
    assert len(list((folder / "shards").glob("model_*.weights.h5"))) > 1
    return folder


@pytest.fixture
def copies(presets, tmp_path):
    shutil.copytree(presets, tmp_path / "copies")
    return tmp_path / "copies"


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def without_checksums(folder):
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["sha256"]
    path.write_text(json.dumps(metadata))
    for index in folder.glob("*.weights.json"):
        content = json.loads(index.read_text())
        del content["metadata"]["sha256"]
        index.write_text(json.dumps(content))


def test_writers_of_one_folder_take_turns(presets, tmp_path):
    """Today's readers see one of them, whole, and no writer fails."""

    def write(number):
        for turn in range(5):
            with staged(tmp_path / "one") as folder:
                for name in ("config.json", "metadata.json"):
                    shutil.copy(presets / "whole" / name, folder)
                (Path(folder) / "model.weights.h5").write_text(f"{number}.{turn}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert os.listdir(tmp_path) == ["one"]
    written = (tmp_path / "one" / "model.weights.h5").read_text()
    assert written in {f"{i}.4" for i in range(4)}


def test_what_killed_saves_left_is_removed_and_nothing_else(presets, tmp_path):
    mine = [".one.abcd1234.partial"]
    others = [".one.partial", ".two.abcd1234.partial", ".one.two.abcd1234.partial"]
    for name in (*mine, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.weights.h5").write_text("half")
    (tmp_path / ".one.abcd5678.partial").write_text("a file")
    with staged(tmp_path / "one") as folder:
        shutil.copy(presets / "whole" / "config.json", folder)
    expected = {"one", ".one.abcd5678.partial", *others}
    assert set(os.listdir(tmp_path)) == expected


def test_an_empty_folder_does_not_cost_the_older_preset(presets, tmp_path):
    target, previous = tmp_path / "one", tmp_path / ".one.previous"
    shutil.copytree(presets / "whole", previous)
    target.mkdir()

    def fail():
        with staged(target):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == ["one"]
    assert sorted(os.listdir(target)) == sorted(os.listdir(presets / "whole"))


def test_all_is_on_the_disk_before_it_takes_its_place(model, tmp_path, monkeypatch):
    synced, renamed = set(), []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(source, target):
        renamed.append(str(target))
        inside = [Path(source), *Path(source).rglob("*")]
        assert {path.stat().st_ino for path in inside} <= synced
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    model.save_to_preset(tmp_path / "preset")
    assert renamed == [str(tmp_path / "preset")]
    # And the name itself.
    assert tmp_path.stat().st_ino in synced


SAVING_WITHOUT_ROOM = """
import os, resource, sys
if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None
from tests.small_models import classifier, vit

os.chdir(sys.argv[1])
model = classifier()
adapted = vit()
adapted.enable_lora(1)
saves = {
    "all.weights.h5": model.save_weights,
    "all.keras": model.save,
    "preset": model.save_to_preset,
    "pairs.lora.h5": adapted.save_lora_weights,
}
for name, save in saves.items():
    save(name)
model.save_weights("parts.weights.json", max_shard_size=2e-5)
# HDF5 used to fail over this, and took the process along at its end.
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
for name, save in saves.items():
    try:
        save(name)
    except OSError as error:
        print(name, error)
# Each shard fits, and all of them in one file would not.
resource.setrlimit(resource.RLIMIT_FSIZE, (210_000, resource.RLIM_INFINITY))
model.save_weights("parts.weights.json", max_shard_size=2e-5)
try:
    model.save_weights("all.weights.h5")
except OSError as error:
    print("all.weights.h5", error)
"""


def test_a_limit_of_files_leaves_process_and_old_files_whole(tmp_path):
    done = run_python("-c", SAVING_WITHOUT_ROOM, tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(
        r"^(\S+) \[Errno 27\] File too large; received: [\d,]+ bytes to write",
        done.stdout,
        re.MULTILINE,
    )
    (*told, again) = told
    assert told == ["all.weights.h5", "all.keras", "preset", "pairs.lora.h5"]
    assert again == told[0]
    parts = [x for x in os.listdir(tmp_path) if x.startswith("parts")]
    assert len(parts) > 2
    assert sorted(os.listdir(tmp_path)) == sorted({*told, *parts})
    models.from_preset(tmp_path / "preset")
    compare_checksums(tmp_path / "parts.weights.json")
    keras.saving.load_model(tmp_path / "all.keras")
    for name in ("all.weights.h5", "pairs.lora.h5"):
        with h5py.File(tmp_path / name) as file:
            assert _weights_file.plain_values(file)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("whole", "task.weights.h5"), ("shards", "model_00001.weights.h5")],
)
def test_changed_weights_are_refused(copies, folder, name):
    folder = copies / folder
    models.from_preset(folder)
    listed = json.loads((folder / "metadata.json").read_text())["sha256"]
    assert set(listed) == {path.name for path in folder.glob("*.h5")}
    # A bit of a weight: HDF5 would not see it.
    with h5py.File(folder / name, "r+") as file:
        datasets = []
        file.visititems(
            lambda _, x: datasets.append(x) if hasattr(x, "shape") else None
        )
        datasets[0][...] = datasets[0][...] + 1
    message = f"{name} of SHA-256 {listed[name]}; received: "
    refuses(message, models.from_preset, folder)
    refuses(message, keras_hub.models.ImageClassifier.from_preset, str(folder))
    # Presets that other libraries saved have none.
    without_checksums(folder)
    models.from_preset(folder)


def test_damaged_files_are_named_with_or_without_checksums(copies, model):
    folder = copies / "whole"
    path = folder / "model.weights.h5"
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    # The head of the file has the tables that HDF5 follows.
    positions = [*draw.integers(0, 12_000, 30), *draw.integers(0, len(whole), 10)]
    for position in positions:
        flip(path, position)
        refuses(re.escape(str(path)), model.backbone.load_weights, path)
        path.write_bytes(whole)
    without_checksums(folder)
    before = [to_numpy(x) for x in model.backbone.weights]
    errors = []
    for position in positions:
        data = bytearray(whole)
        data[position : position + 8] = draw.bytes(len(data[position : position + 8]))
        path.write_bytes(data)
        try:
            model.backbone.load_weights(path)
        except ValueError as error:
            errors.append(str(error))
    model.backbone.set_weights(before)
    assert len(errors) > 2
    # Or Keras says which weight does not fit.
    report = (str(path), "could not be loaded", "shape")
    assert [x for x in errors if not any(text in x for text in report)] == []


def test_a_damaged_preset_is_named_by_describe(copies):
    folder = copies / "whole"
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for change in (
        {"hidden_dim": "x"}, {"image_shape": 3}, {"moe_layers": 3.5}, {"router": 7},
        {"nonsense": 1}, {"num_layers": None},
    ):  # fmt: skip
        config = {**whole, "config": {**whole["config"], **change}}
        path.write_text(json.dumps(config))
        refuses(re.escape(str(folder)), models.describe, folder)
    path.write_text("[" * 100_000)
    refuses(re.escape(str(folder)), models.describe, folder)
    path.write_text(json.dumps(whole))
    weights = folder / "model.weights.h5"
    # A bit within the arrays, which HDF5 does not see.
    models.describe(folder)
    flip(weights)
    refuses(re.escape(f"{weights} of SHA-256"), models.describe, folder)
    flip(weights)
    weights.write_bytes(weights.read_bytes()[:3000])
    refuses(re.escape(str(weights)), models.describe, folder)


def test_damaged_pairs_and_soups_are_named(model, tmp_path):
    backbone = vit()
    backbone.enable_lora(2)
    path = tmp_path / "pairs.lora.h5"
    backbone.save_lora_weights(path)
    path.write_bytes(path.read_bytes()[:4000])
    other = vit()
    refuses(re.escape(str(path)), other.load_lora_weights, path)
    # Nothing of it was added.
    assert not any("lora" in weight.name for weight in other.weights)
    soup = tmp_path / "all.weights.h5"
    model.save_weights(soup)
    # Where HDF5 looks for names.
    soup.write_bytes(soup.read_bytes().replace(b"SNOD", b"DONS"))
    refuses(re.escape(str(soup)), greedy_soup, model, [soup], lambda model: 1.0)


@pytest.fixture
def layers():
    made = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])
    made.build((None, 8))
    return made


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, layers):
    path = tmp_path / "a.weights.h5"
    path.write_bytes(b"older")
    with pytest.raises(KeyError, match="mine"), _weights_file.new_hdf5(path, ()):
        raise KeyError("mine")

    def interrupted(*args, **options):
        (args[1]).write_bytes(b"half")
        raise KeyboardInterrupt("now")

    monkeypatch.setattr(keras.saving, "save_weights", interrupted)
    with pytest.raises(KeyboardInterrupt, match="now"):
        _weights_file.save_weights(layers, path)
    assert contents(tmp_path) == {path.name: b"older"}


def test_a_declared_shape_takes_no_memory(tmp_path, layers):
    """A million rows of a million, of which no value is in the file."""
    path = tmp_path / "a.weights.h5"
    _weights_file.save_weights(layers, path)
    with h5py.File(path, "r+") as file:
        name = "layers/dense/vars/0"
        del file[name]
        file.create_dataset(name, (10**6, 10**6), "float32", chunks=(1000, 1000))
    message = re.escape(f"HDF5 file at {path}; received: ValueError: Not allowed: ")
    with pytest.raises(ValueError, match=message), _weights_file.checked_weights(path):
        keras.saving.load_weights(layers, path)
    with h5py.File(path) as file, pytest.raises(ValueError, match=r"declares 3.64 TB"):
        _weights_file.plain_values(file)


SIZE = 3e-7


@pytest.fixture
def index(tmp_path, layers):
    """The index of weights in two shards."""
    path = tmp_path / "x.weights.json"
    _weights_file.save_weights(layers, path, max_shard_size=SIZE)
    assert len(list(tmp_path.glob("x_*.weights.h5"))) == 2
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("call", [2, "rename"])
def test_a_failed_save_of_shards_changes_none_of_the_files(
    tmp_path, monkeypatch, layers, index, call
):
    """The disk is full, or fails, at a shard, at the index or when that is renamed."""
    before = contents(tmp_path)
    layers.set_weights([x + 1 for x in layers.get_weights()])
    calls, rename = [], os.replace

    def sync(path):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "full")

    def replace(part, path):
        if call == "rename" and str(path).endswith(".json"):
            raise OSError(errno.ENOSPC, "full")
        rename(part, path)

    monkeypatch.setattr(_weights_file._files, "sync_file", sync)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="full"):
        _weights_file.save_weights(layers, index, max_shard_size=SIZE)
    assert contents(tmp_path) == before


def test_shards_of_two_saves_are_not_mixed(tmp_path, layers, index):
    shard = tmp_path / "x_00001.weights.h5"
    older = shard.read_bytes()
    layers.set_weights([x + 1 for x in layers.get_weights()])
    _weights_file.save_weights(layers, index, max_shard_size=SIZE)
    keras.saving.load_weights(layers, index)
    names = [f"x_0000{number}.weights.h5" for number in (0, 1)]
    assert [x.name for x in compare_checksums(index)][1:] == names
    shard.write_bytes(older)
    refuses(re.escape(f"{shard} of SHA-256"), compare_checksums, index)


@pytest.mark.parametrize(
    "name", ["../x.weights.h5", "/x.weights.h5", ["a.weights.h5", 3], "x.json"]
)
def test_shards_of_other_names_are_refused(index, name):
    content = json.loads(index.read_text())
    content["weight_map"] = {"/layers": name}
    for path in (index, index.with_name("model.weights.json")):
        path.write_text(json.dumps(content))
        refuses(re.escape(f"of the same folder in {path}"), compare_checksums, path)


@pytest.mark.parametrize("sums", [None, {}, {"model.weights.h5": 5}])
def test_checksums_of_another_kind_are_not_skipped(tmp_path, sums):
    path, metadata = tmp_path / "model.weights.h5", tmp_path / "metadata.json"
    path.write_bytes(b"weights")
    (tmp_path / "soup.weights.h5").write_bytes(b"weights")
    metadata.write_text(json.dumps({"sha256": sums}))
    refuses(re.escape(f'in "sha256" of {metadata}'), compare_checksums, path)
    # The user's own file beside it has none.
    compare_checksums(tmp_path / "soup.weights.h5")
    metadata.write_text("{}")
    compare_preset(tmp_path)
