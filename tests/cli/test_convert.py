import json

import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.saving._preset_folder import is_preset
from tests import golden
from tests.published import CHECKPOINTS, hub_clip, hub_randomized, timm_folder
from tests.refusals import refuses


@pytest.fixture
def convert(program):
    return lambda *arguments: program("convert", *arguments)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_checkpoint_becomes_a_preset(tmp_path, done):
    source, out = CHECKPOINTS / "vit_classic_prelogits.npz", tmp_path / "preset"
    stdout = done("convert", source, out)
    assert "pre_logits/kernel [24, 20]" in stdout
    arrays, _ = golden.load("07_checkpoints/vit_classic_prelogits_expected")
    outputs = models.from_preset(str(out)).predict(arrays["inputs/images"], verbose=0)
    np.testing.assert_allclose(outputs, arrays["outputs/logits"], rtol=1e-4, atol=1e-5)
    report = json.loads((out / "conversion.json").read_text())
    assert report["scheme"] == "ViT (Google)"
    assert len(report["weights"]) == len(np.load(source).files)


def test_a_failure_leaves_nothing(tmp_path, convert):
    bias = np.full(7, np.nan, "float32")
    arrays = {**np.load(CHECKPOINTS / "vit_classic.npz"), "head/bias": bias}
    np.savez(tmp_path / "vit.npz", **arrays)
    status, _, stderr = convert(tmp_path / "vit.npz", tmp_path / "out", "--no-verify")
    assert status == 2
    assert "head/bias" in stderr
    assert not (tmp_path / "out").exists()


def test_weights_of_others_are_no_older_preset(tmp_path, convert):
    folder = tmp_path / "timm"
    timm_folder(folder, "vit_token")
    before = contents(folder)
    status, _, stderr = convert(CHECKPOINTS / "vit_classic.npz", folder)
    assert status == 2
    assert "an older preset" in stderr
    model = models.from_preset("vmoe_digits", load_weights=False)
    refuses("an older preset", model.save_to_preset, folder)
    assert contents(folder) == before
    assert not is_preset(folder)
    model.save_to_preset(tmp_path / "ours")
    assert is_preset(tmp_path / "ours")
    model.save_to_preset(tmp_path / "ours")


def test_a_failed_verification_keeps_what_was_there(tmp_path, convert, monkeypatch):
    def fail(*_):
        raise ValueError("it differs")

    model = models.from_preset("vmoe_digits", load_weights=False)
    model.save_to_preset(tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr("keras_moe.cli.convert.compare_saved", fail)
    for out in ("out", "new"):
        status, _, stderr = convert(CHECKPOINTS / "vit_classic.npz", tmp_path / out)
        assert (status, stderr) == (2, "error: it differs\n")
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_pairs_and_their_towers(tmp_path, done):
    hub_randomized(hub_clip()).save_to_preset(tmp_path / "hub")
    options = {"ContrastiveModel": (), "TextBackbone": ("--tower", "text")}
    for name, arguments in options.items():
        out = tmp_path / name
        done("convert", tmp_path / "hub", out, "--quiet", *arguments)
        assert type(models.from_preset(str(out))).__name__ == name
