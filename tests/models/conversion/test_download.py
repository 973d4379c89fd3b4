"""Released files come from their buckets: a server on this machine stands in."""

import functools
import http.server
import shutil
import threading

import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.conversion import sources
from tests import golden
from tests.models.conversion.test_conversion import timm_folder

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
