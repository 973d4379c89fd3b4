"""The classes and `describe` take the sources that `models.from_preset` takes."""

import json
import shutil
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import (
    MixerBackbone,
    MixerImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
)
from tests import golden
from tests.models.conversion.test_conversion import hub_vit, timm_folder

CHECKPOINTS = golden.FOLDER / "07_checkpoints"

pytestmark = pytest.mark.backend_free


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
    np.testing.assert_allclose(
        model.predict(images, verbose=0), arrays["outputs/logits"], rtol=1e-4, atol=1e-4
    )
    for cls in (ViTBackbone, MyBackbone):
        backbone = cls.from_preset(source, dropout_rate=0.1)
        assert type(backbone) is cls
        assert backbone.get_config()["dropout_rate"] == 0.1
        np.testing.assert_array_equal(
            backbone.predict(images, verbose=0),
            model.backbone.predict(images, verbose=0),
        )
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
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other)
        )
    assert models.describe(folder).parameters == received.count_params()
    # With two it is not known which.
    shutil.copy(CHECKPOINTS / "mixer.npz", folder / "other.npz")
    shutil.copy(CHECKPOINTS / "mixer.npz", folder / "third.npz")
    if case != "mixer.safetensors":
        with pytest.raises(ValueError, match=r"other\.npz"):
            models.from_preset(folder)


@pytest.mark.parametrize(
    ("cls", "case", "word"),
    [
        (MixerBackbone, "vit_classic", "weights of a MixerBackbone for MixerBackbone"),
        (MixerImageClassifier, "vit_classic", "those of a ViTBackbone"),
        (ViTBackbone, "mixer", "those of a MixerBackbone, by the names of MLP-Mixer"),
        (ViTImageClassifier, "mixer", "weights of a ViTBackbone for ViTImageClass"),
    ],
)
def test_weights_of_another_kind(cls, case, word):
    with pytest.raises(ValueError, match=word):
        cls.from_preset(str(CHECKPOINTS / f"{case}.npz"))


def test_pickles_are_refused_here_too(tmp_path):
    for door in (ViTBackbone.from_preset, models.describe):
        with pytest.raises(ValueError, match="runs the code"):
            door(str(tmp_path / "model.pt"))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_classes": 3}, {"image_shape": (64, 32, 1)}, {"patch_size": 4}],
)
@pytest.mark.parametrize("case", ["vit_classic_prelogits.npz", "vmoe_tiny/vmoe_tiny"])
def test_described_is_what_is_converted(case, overrides):
    source = str(CHECKPOINTS / case)
    description = models.describe(source, **overrides)
    model = models.from_preset(source, load_weights=False, **overrides)
    assert description.parameters == model.count_params()
    assert description.to_dict() | {"name": 0} == models.describe(model).to_dict() | {
        "name": 0
    }
    assert description.name == source


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

    from keras_moe.models.conversion._readers import NpzCheckpoint

    monkeypatch.setattr(NpzCheckpoint, "read", read)
    description = models.describe(str(CHECKPOINTS / "vit_classic.npz"))
    assert description.parameters > 0
    with pytest.raises(ValueError, match="num_layer=3"):
        models.describe(str(CHECKPOINTS / "vit_classic.npz"), num_layer=3)
