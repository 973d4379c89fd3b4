"""Sources are recognised, downloaded once, and taken by classes and `describe`."""

import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import keras
import keras_hub
import pytest

from keras_moe import models
from keras_moe.models import (
    MixerBackbone,
    MixerImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
    _remote,
)
from keras_moe.models.conversion import sources
from keras_moe.models.conversion._readers import NpzCheckpoint
from tests import golden
from tests.compare import assert_close, assert_same
from tests.published import CHECKPOINTS, hub_vit, open_clip_folder, timm_folder
from tests.refusals import refuses


@keras.saving.register_keras_serializable("tests")
class MyBackbone(ViTBackbone):
    """A user's own."""


@pytest.mark.parametrize("as_path", [True, False])
def test_classes_take_published_weights(as_path):
    source = CHECKPOINTS / "vit_classic.npz"
    source = source if as_path else str(source)
    arrays, _ = golden.load("07_checkpoints/vit_classic_expected")
    images = arrays["inputs/images"]
    model = ViTImageClassifier.from_preset(source)
    assert type(model) is ViTImageClassifier
    assert_close(model.predict(images, verbose=0), arrays["outputs/logits"], 1e-4, 1e-4)
    for cls in (ViTBackbone, MyBackbone):
        backbone = cls.from_preset(source, dropout_rate=0.1)
        assert type(backbone) is cls
        assert backbone.get_config()["dropout_rate"] == 0.1
        expected = model.backbone.predict(images, verbose=0)
        assert_same(backbone.predict(images, verbose=0), expected)
    assert ViTImageClassifier.from_preset(source, num_classes=3).num_classes == 3


def test_classes_take_folders_and_models(tmp_path):
    mixer = timm_folder(tmp_path, "mixer")
    assert type(MixerBackbone.from_preset(mixer)) is MixerBackbone
    assert type(MixerImageClassifier.from_preset(mixer)) is MixerImageClassifier
    assert type(ViTBackbone.from_preset(hub_vit())) is ViTBackbone
    new = ViTImageClassifier.from_preset(hub_vit(), num_classes=3, load_weights=False)
    assert new.output_shape == (None, 3)


@pytest.mark.parametrize("case", ["vit_classic.npz", "vmoe_tiny", "mixer.safetensors"])
def test_a_folder_with_one_checkpoint_is_that_checkpoint(case, tmp_path):
    folder, source = tmp_path / "folder", CHECKPOINTS / case
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    if case == "vmoe_tiny":
        shutil.copytree(source, folder, dirs_exist_ok=True)
        source = source / "vmoe_tiny"
    elif case == "mixer.safetensors":
        source = timm_folder(tmp_path / "timm", "mixer")
        for path in Path(source).iterdir():
            name = path.name.replace("model.", "mixer_of_mine.")
            shutil.copy(path, folder / name)
    else:
        shutil.copy(source, folder)
    expected, received = models.from_preset(source), models.from_preset(folder)
    for one, other in zip(expected.weights, received.weights, strict=True):
        assert_same(one, other)
    assert models.describe(folder).parameters == received.count_params()
    # With two it is not known which.
    shutil.copy(CHECKPOINTS / "mixer.npz", folder / "other.npz")
    shutil.copy(CHECKPOINTS / "mixer.npz", folder / "third.npz")
    if case != "mixer.safetensors":
        refuses(r"other\.npz", models.from_preset, folder)


def test_described_sources_of_every_kind(tmp_path):
    sources = [timm_folder(tmp_path / case, case) for case in ("vit_avg", "mixer")]
    sources.append(hub_vit())
    sources.append(keras_hub.models.ViTImageClassifier(hub_vit(), 3))
    sources[2].save_to_preset(tmp_path / "hub")
    sources.append(str(tmp_path / "hub"))
    for source in sources:
        description = models.describe(source, dtype="bfloat16")
        assert description.parameters == models.from_preset(source).count_params()
        assert json.dumps(description.to_dict())


def test_describing_reads_no_weight(monkeypatch):
    def read(*_):
        raise AssertionError("read")

    monkeypatch.setattr(NpzCheckpoint, "read", read)
    description = models.describe(str(CHECKPOINTS / "vit_classic.npz"))
    assert description.parameters > 0
    with pytest.raises(ValueError, match="num_layer=3"):
        models.describe(str(CHECKPOINTS / "vit_classic.npz"), num_layer=3)


@pytest.mark.parametrize("name", ["run.ckpt", "x.safetensors"])
def test_a_folder_may_have_any_name(tmp_path, name):
    model = models.from_preset("vmoe_digits", load_weights=False)
    model.save_to_preset(tmp_path / name)
    again = models.from_preset(str(tmp_path / name))
    assert again.count_params() == model.count_params()


def test_other_presets_are_left_alone(tmp_path):
    model = models.from_preset("vmoe_digits", load_weights=False)
    model.save_to_preset(tmp_path / "ours")
    for source in ("vmoe_b32", "resnet", 3, tmp_path / "ours", tmp_path):
        assert not sources.is_convertible(source)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    requests = []

    def log_message(self, *_):
        if self.command == "GET":
            self.requests.append(self.path)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """A folder that is served as Google's storage, and an empty cache."""
    folder = tmp_path / "storage"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(_remote, "GOOGLE_STORAGE", address)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "cache"))
    _Quiet.requests.clear()
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_released_vmoe_is_downloaded_once(storage):
    shutil.copytree(CHECKPOINTS / "vmoe_tiny", storage / "vmoe_checkpoints")
    expected, _ = golden.load("07_checkpoints/vmoe_tiny_expected")
    for _ in range(2):
        model = models.from_preset("gs://vmoe_checkpoints/vmoe_tiny")
        actual = model.predict(expected["inputs/images"], verbose=0)
        assert_close(actual, expected["outputs/logits"], atol=1e-4)
    assert len(_Quiet.requests) == 4


@pytest.mark.parametrize("bucket", ["vit_models/augreg", "mixer_models/imagenet21k"])
def test_a_released_npz_is_downloaded(storage, bucket):
    name = "mixer" if "mixer" in bucket else "vit_classic"
    (storage / bucket).mkdir(parents=True)
    shutil.copy(CHECKPOINTS / f"{name}.npz", storage / bucket)
    model, report = models.convert(f"gs://{bucket}/{name}.npz")
    assert model.output_shape == (None, 7)
    assert report.source == f"gs://{bucket}/{name}.npz"


def test_what_cannot_be_downloaded_leaves_nothing(storage, tmp_path):
    (storage / "vmoe_checkpoints").mkdir()
    index = CHECKPOINTS / "vmoe_tiny" / "vmoe_tiny.index"
    shutil.copy(index, storage / "vmoe_checkpoints")
    with pytest.raises(ValueError, match=r"data-00000-of-00003.*404"):
        models.from_preset("gs://vmoe_checkpoints/vmoe_tiny")
    files = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files == ["vmoe_tiny.index"]
    refuses("received", models.from_preset, "gs://vit_models/../secret.npz")


@pytest.mark.parametrize("make", ["timm", "open_clip"])
def test_configs_with_odd_values_are_named(tmp_path, make):
    if make == "timm":
        timm_folder(tmp_path, "vit_token")
        path = tmp_path / "config.json"
    else:
        open_clip_folder(tmp_path, {"ls_init_value": None}, quick_gelu=False)
        path = tmp_path / "open_clip_config.json"
    whole = json.loads(path.read_text())
    places, dicts, told = [], [whole], []
    for content in dicts:
        places += [(content, name) for name in content]
        dicts += [x for x in content.values() if isinstance(x, dict)]
    for content, name in places:
        value = content[name]
        for odd in (None, "x", -1, [None] * 3, 10**30, {"a": 1}):
            content[name] = odd
            path.write_text(json.dumps(whole))
            try:
                models.describe(tmp_path)
            except ValueError as error:
                told.append(str(error))
        content[name] = value
    assert len(told) > 50
    assert [text for text in told if "Expected" not in text] == []
