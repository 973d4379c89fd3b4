import importlib.util
import json

import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.cli import convert as command
from keras_moe.models.saving._preset_folder import is_preset
from tests import golden
from tests.published import CHECKPOINTS, hub_clip, hub_randomized, hub_vit, timm_folder
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
    assert "not compared with the source's model" in stdout
    assert "not installed" not in stdout
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


@pytest.mark.parametrize("step", ["verify", "compare_saved"])
def test_a_failed_verification_keeps_what_was_there(
    tmp_path, convert, monkeypatch, step
):
    def fail(*_):
        raise ValueError("it differs")

    models.from_preset("vmoe_digits", load_weights=False).save_to_preset(
        tmp_path / "out"
    )
    before = contents(tmp_path / "out")
    monkeypatch.setattr(f"keras_moe.cli.convert.{step}", fail)
    for out in ("out", "new"):
        status, _, stderr = convert(CHECKPOINTS / "vit_classic.npz", tmp_path / out)
        assert (status, stderr) == (2, "error: it differs\n")
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# A module in timm's place, in its process: it writes down its arguments.
_TIMM = """
import json, pathlib, sys
import numpy as np
import torch

call = {"tensorflow": "tensorflow" in sys.modules}
place = pathlib.Path(__file__).with_name("call")


def is_model(name):
    return name.startswith("vit")


def create_model(architecture, **arguments):
    call.update(architecture=architecture, **arguments)
    return Model()


class Model:
    def load_state_dict(self, state):
        np.savez(place.with_suffix(".npz"), **{k: v.numpy() for k, v in state.items()})

    def eval(self):
        place.with_suffix(".json").write_text(json.dumps(call))
        return lambda pixels: pixels.mean((2, 3))
"""


@pytest.fixture
def fake_timm(tmp_path, monkeypatch):
    """Puts a package of this source in timm's place; returns its folder."""

    def write(source):
        package = tmp_path / "packages" / "timm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(package.parent))
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        return package

    return write


def test_timm_gets_the_opened_files_in_its_own_process(tmp_path, fake_timm):
    package = fake_timm(_TIMM)
    mean, std = [0.4, 0.5, 0.3], [0.2, 0.3, 0.25]
    folder = timm_folder(tmp_path / "model", "vit_token", mean, std)
    # timm's own loader would take the pickle where there is no other file.
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    images = np.zeros((1, 32, 32, 3), "float32")
    outputs = command.timm_outputs(folder, images)
    np.testing.assert_allclose(outputs[0], (0.5 - np.array(mean)) / std, rtol=1e-5)
    call = json.loads((package / "call.json").read_text())
    # Both in one process abort it.
    assert call["tensorflow"] is False
    assert call["pretrained"] is False
    assert call["architecture"] == "vit_base_patch16_224"
    assert (call["num_classes"], call["img_size"], call["depth"]) == (7, 32, 2)
    assert "checkpoint_path" not in call
    arrays, _ = golden.load("12_timm/vit_token")
    with np.load(package / "call.npz") as state:
        assert {f"state_dict/{name}" for name in state.files} <= arrays.keys()
        for name in state.files:
            np.testing.assert_array_equal(state[name], arrays[f"state_dict/{name}"])


@pytest.mark.parametrize(("source", "reason"), [
    ("import os\nos.abort()", "timm failed with"),
    ("raise ImportError('no torchvision')", "ImportError: no torchvision"),
])  # fmt: skip
def test_a_process_of_timm_that_fails_leaves_the_conversion(
    tmp_path, done, fake_timm, source, reason
):
    fake_timm(source)
    folder = timm_folder(tmp_path / "model", "vit_token")
    stdout = done("convert", folder, tmp_path / "out", "--quiet")
    assert "not compared with the source's model" in stdout
    assert reason in " ".join(stdout.split())
    assert is_preset(tmp_path / "out")


def test_without_safetensors_timm_is_not_asked(tmp_path):
    timm_folder(tmp_path, "vit_token")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        command.timm_outputs(str(tmp_path), np.zeros((1, 32, 32, 3)))


@pytest.mark.parametrize(
    "architecture", ["hf-hub:someone/model", "local-dir:x", "no_such_model"]
)
def test_an_architecture_that_is_an_address_is_not_followed(
    tmp_path, fake_timm, architecture
):
    fake_timm(_TIMM)
    folder = timm_folder(tmp_path / "m", "vit_token", architecture=architecture)
    with pytest.raises(command.Uncompared, match="an architecture of timm"):
        command.timm_outputs(folder, np.zeros((1, 32, 32, 3)))


@pytest.mark.parametrize("case", ["vit_token", "vit_avg", "vit_qk_norm"])
def test_timms_own_model_is_compared(tmp_path, done, case):
    # Not imported here: beside TensorFlow that would abort the process.
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    folder = timm_folder(tmp_path / "timm", case, [0.4, 0.5, 0.3])
    stdout = done("convert", folder, tmp_path / "out", "--quiet")
    assert "equal the source's own model" in stdout


@pytest.mark.parametrize("task", [False, True])
def test_keras_hubs_own_model_is_compared(tmp_path, done, task):
    hub = keras_hub.models.ViTImageClassifier(hub_vit(), 3) if task else hub_vit()
    hub_randomized(hub).save_to_preset(tmp_path / "hub")
    stdout = done("convert", tmp_path / "hub", tmp_path / "out", "--quiet")
    assert "equal the source's own model" in stdout
    assert "patch_embedding" not in stdout
    if not task:
        return
    # A new head of the same size is no error.
    stdout = done("convert", tmp_path / "hub", tmp_path / "new", "--num-classes", 3)
    assert "arguments were overridden" in stdout


def test_pairs_and_their_towers(tmp_path, done):
    hub_randomized(hub_clip()).save_to_preset(tmp_path / "hub")
    for arguments, name in (
        ((), "ContrastiveModel"),
        (("--tower", "text"), "TextBackbone"),
    ):
        out = tmp_path / name
        stdout = done("convert", tmp_path / "hub", out, "--quiet", *arguments)
        # The console breaks lines.
        assert "compares images alone" in " ".join(stdout.split())
        assert type(models.from_preset(str(out))).__name__ == name
