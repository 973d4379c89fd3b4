import json

import numpy as np
import pytest

from keras_moe import models
from tests import golden
from tests.models.conversion.test_conversion import hub_vit, randomized
from tests.tools.test_tools import run

CHECKPOINTS = golden.FOLDER / "07_checkpoints"

pytestmark = pytest.mark.backend_free


def test_a_checkpoint_becomes_a_preset(tmp_path):
    source, out = CHECKPOINTS / "vit_classic_prelogits.npz", tmp_path / "preset"
    result = run("tools/convert.py", source, out)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "pre_logits/kernel [24, 20]" in result.stdout
    arrays, _ = golden.load("07_checkpoints/vit_classic_prelogits_expected")
    found = models.from_preset(str(out)).predict(arrays["inputs/images"], verbose=0)
    np.testing.assert_allclose(found, arrays["outputs/logits"], rtol=1e-4, atol=1e-5)
    report = json.loads((out / "conversion.json").read_text())
    assert report["scheme"] == "ViT (Google)"
    assert len(report["weights"]) == len(np.load(source).files)


def test_keras_hubs_own_model_is_compared(tmp_path):
    randomized(hub_vit()).save_to_preset(tmp_path / "hub")
    result = run("tools/convert.py", tmp_path / "hub", tmp_path / "out", "--quiet")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal the source's own model" in result.stdout
    assert "patch_embedding" not in result.stdout


def test_a_failure_leaves_nothing(tmp_path):
    arrays = dict(np.load(CHECKPOINTS / "vit_classic.npz"))
    np.savez(tmp_path / "vit.npz", left=np.zeros(3), **arrays)
    result = run("tools/convert.py", tmp_path / "vit.npz", tmp_path / "out")
    assert result.returncode == 1
    assert "left over" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    source = CHECKPOINTS / "vit_classic.npz"
    result = run("tools/convert.py", source, tmp_path / "other")
    assert result.returncode == 1
    assert "a new folder or an older preset" in result.stderr
