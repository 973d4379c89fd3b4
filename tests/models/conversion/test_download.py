"""Released files come from their buckets: a server on this machine stands in."""

import functools
import http.server
import os
import shutil
import threading

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.conversion import sources
from tests import golden
from tests.models.conversion.test_conversion import timm_folder
from tests.models.conversion.writers import write_folder
from tools import guides

CHECKPOINTS = golden.FOLDER / "07_checkpoints"

pytestmark = pytest.mark.backend_free


class _Quiet(http.server.SimpleHTTPRequestHandler):
    requests = []

    def log_message(self, *_):
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
    monkeypatch.setattr(sources, "GOOGLE_STORAGE", address)
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
        np.testing.assert_allclose(actual, expected["outputs/logits"], atol=1e-4)
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
    with pytest.raises(ValueError, match="received"):
        models.from_preset("gs://vit_models/../secret.npz")


def test_a_folder_behind_a_handle(tmp_path, monkeypatch):
    arrays, _ = golden.load("12_timm/vit_token")
    timm_folder(tmp_path, "vit_token")

    def get_file(preset, name):
        assert preset == "hf://timm/vit"
        if not (tmp_path / name).is_file():
            raise FileNotFoundError(name)
        return str(tmp_path / name)

    def exists(preset, name):
        return (tmp_path / name).is_file()

    monkeypatch.setattr(sources, "get_file", get_file)
    monkeypatch.setattr(sources, "check_file_exists", exists)
    model = models.from_preset("hf://timm/vit")
    actual = model.predict(arrays["inputs/images"], verbose=0)
    np.testing.assert_allclose(actual, arrays["outputs/logits"], atol=1e-4)


def test_the_guides_cell_that_needs_a_network(tmp_path, monkeypatch):
    """It runs as it is written, on files in the form of the release that it names."""
    [cell] = [
        cell.source
        for cell in guides.code_cells(
            guides.read_source(guides.GUIDES / "fine_tune_another_resolution.py")
        )
        if "KERAS_MOE_ONLINE" in cell.source
    ]
    # The names, patches and depth of the release; its config tells no number of heads.
    dim, patch, classes = 192, 16, 21
    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, 1 + (224 // patch) ** 2, dim),
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "head.weight": (classes, dim),
        "head.bias": (classes,),
    }
    for name, shape in {
        "norm1.weight": (dim,),
        "norm1.bias": (dim,),
        "attn.qkv.weight": (3 * dim, dim),
        "attn.qkv.bias": (3 * dim,),
        "attn.proj.weight": (dim, dim),
        "attn.proj.bias": (dim,),
        "norm2.weight": (dim,),
        "norm2.bias": (dim,),
        "mlp.fc1.weight": (4 * dim, dim),
        "mlp.fc1.bias": (4 * dim,),
        "mlp.fc2.weight": (dim, 4 * dim),
        "mlp.fc2.bias": (dim,),
    }.items():
        shapes |= {f"blocks.{block}.{name}": shape for block in range(12)}
    generator = np.random.default_rng(0)
    arrays = {
        name: 0.05 * generator.normal(size=shape).astype("float32")
        for name, shape in shapes.items()
    }
    config = {
        "architecture": "vit_base_patch16_224",
        "num_classes": classes,
        "num_features": dim,
        "global_pool": "token",
        "pretrained_cfg": {
            "tag": "augreg_in21k",
            "custom_load": False,
            "input_size": [3, 224, 224],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    write_folder(tmp_path, arrays, config)
    published = "hf://timm/vit_base_patch16_224.augreg_in21k"

    def get_file(preset, name):
        assert preset == published
        if not (tmp_path / name).is_file():
            raise FileNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(sources, "get_file", get_file)
    monkeypatch.setattr(
        sources, "check_file_exists", lambda _, name: (tmp_path / name).is_file()
    )
    monkeypatch.setenv("KERAS_MOE_ONLINE", "1")
    values = {"os": os, "models": models}
    exec(cell, values)
    photos = values["photos"]
    assert photos.backbone.image_shape == (384, 384, 3)
    assert photos.backbone.grid == (24, 24)
    image = generator.uniform(-1, 1, (1, 384, 384, 3)).astype("float32")
    assert np.isfinite(np.asarray(photos.predict(image, verbose=0))).all()
    assert photos.output_shape == (None, 10)
    _, report = models.convert(published, num_classes=10, image_shape=(384, 384, 3))
    assert sorted(report.ignored) == ["head.bias", "head.weight"]
    [positions] = [x for x in report.weights if "position" in x.weight]
    assert positions.how.startswith("resized from (14, 14) to (24, 24)")
    class_token = keras.ops.convert_to_numpy(
        photos.backbone.get_layer("class_token").weights[0]
    )
    np.testing.assert_array_equal(class_token.ravel(), arrays["cls_token"].ravel())
