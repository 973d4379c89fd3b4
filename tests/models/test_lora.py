"""Low-rank adaptation of whole models: attention by default, experts by name."""

import h5py
import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import MixerBackbone, ViTBackbone, ViTImageClassifier, adaptation
from tests.small_models import SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")

to_numpy = keras.ops.convert_to_numpy
NAMES = ["query", "value", "experts"]


def images(batch=8):
    shape = (batch, *SMALL["image_shape"])
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def labels(batch=8):
    return np.arange(batch) % 3


def backbone():
    keras.utils.set_random_seed(0)
    return ViTBackbone.from_config({**SMALL, "seed": 0})


def classifier():
    model = ViTImageClassifier(backbone(), 3)
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    return model


def own_path(weight):
    return weight.path.split("block_")[-1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, {"query", "value"}),
        (NAMES, {"query", "value", "experts"}),
        (["experts"], {"experts"}),
        (["key", "hidden"], {"key", "hidden"}),
    ],
)
def test_only_the_pairs_of_the_named_layers_are_trainable(names, expected):
    model = backbone()
    # Op by op: two programs may round differently.
    before = to_numpy(model(images()))
    model.enable_lora(2, target_layer_names=names)
    np.testing.assert_array_equal(to_numpy(model(images())), before)
    assert all("lora" in weight.name for weight in model.trainable_weights)
    assert {w.path.split("/")[-2] for w in model.trainable_weights} == expected
    # One pair for each kernel of attention or of an MLP, two for an expert's.
    attention = len(expected - {"experts", "hidden"}) * SMALL["num_layers"]
    pairs = attention + ("hidden" in expected) + 2 * ("experts" in expected)
    assert len(model.trainable_weights) == 2 * pairs


@pytest.mark.every_backend
@pytest.mark.usefixtures("traced")
def test_training_lowers_the_loss_and_changes_the_pairs_alone():
    model = classifier()
    model.enable_lora(2, target_layer_names=NAMES)
    model.output_dense.trainable = False
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    before = {weight.path: to_numpy(weight).copy() for weight in model.weights}
    history = model.fit(images(), labels(), batch_size=4, epochs=12, verbose=0).history[
        "loss"
    ]
    assert history[-1] < 0.8 * history[0]
    for weight in model.weights:
        changed = not np.array_equal(to_numpy(weight), before[weight.path])
        assert changed == ("lora" in weight.name), weight.path
    # The experts' pairs went apart: each has learned from its own tokens.
    b = next(w for w in model.weights if w.path.endswith("experts/output_lora_b"))
    b = to_numpy(b)
    assert all(np.abs(b[i] - b[j]).max() > 1e-3 for i in range(4) for j in range(i))


def test_a_tasks_head_stays_trainable():
    model = classifier()
    model.enable_lora(2)
    names = {own_path(weight) for weight in model.trainable_weights}
    assert {"predictions/kernel", "predictions/bias"} < names
    assert all("lora" in name or "predictions" in name for name in names)


def adapted():
    """A classifier whose pairs say something."""
    model = classifier()
    model.enable_lora(2, target_layer_names=NAMES)
    generator = np.random.default_rng(2)
    for weight in model.backbone.trainable_weights:
        weight.assign(0.1 * generator.normal(size=weight.shape))
    return model


def test_a_preset_has_the_pairs_in_its_weights(tmp_path):
    model = adapted()
    before = classifier().predict(images(), verbose=0)
    expected = model.predict(images(), verbose=0)
    assert np.abs(expected - before).max() > 0.01
    model.save_to_preset(tmp_path / "merged")
    loaded = models.from_preset(str(tmp_path / "merged"))
    assert not [weight for weight in loaded.weights if "lora" in weight.name]
    # Summed before the matmul or after it: the same but for rounding.
    np.testing.assert_allclose(
        loaded.predict(images(), verbose=0), expected, rtol=1e-3, atol=1e-3
    )


def test_the_pairs_alone_are_saved_and_loaded(tmp_path):
    model = adapted()
    path = tmp_path / "pairs.lora.h5"
    model.backbone.save_lora_weights(path)
    expected = model.backbone.predict(images(), verbose=0)
    # Once into a backbone as it comes, and once into one with pairs.
    for enable in (False, True):
        other = backbone()
        if enable:
            other.enable_lora(2, target_layer_names=NAMES)
        other.load_lora_weights(path)
        assert len(other.trainable_weights) == 12
        np.testing.assert_array_equal(other.predict(images(), verbose=0), expected)
    wrong = backbone()
    wrong.enable_lora(3, target_layer_names=NAMES)
    with pytest.raises(ValueError, match=r"of shape \(.*\); received: shape="):
        wrong.load_lora_weights(path)
    wrong = backbone()
    wrong.enable_lora(2)
    with pytest.raises(ValueError, match="received: shape="):
        wrong.load_lora_weights(path)


def test_a_save_of_pairs_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model = adapted()
    path = tmp_path / "pairs.lora.h5"
    model.backbone.save_lora_weights(path)
    before = path.read_bytes()
    monkeypatch.setattr(adaptation.keras.ops, "convert_to_numpy", lambda _: object())
    with pytest.raises(TypeError):
        model.backbone.save_lora_weights(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.lora.h5"]


def test_mixers_have_experts_too():
    sizes = {k: v for k, v in SMALL.items() if k != "num_heads"}
    mixer = MixerBackbone.from_config({**sizes, "token_mlp_dim": 8})
    mixer.enable_lora(2, target_layer_names=["experts"])
    assert len(mixer.trainable_weights) == 4
    with pytest.raises(ValueError, match="without \\['query', 'value'\\]"):
        MixerBackbone.from_config({**sizes, "token_mlp_dim": 8}).enable_lora(2)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without \\['expert'\\]"):
        backbone().enable_lora(2, target_layer_names=["expert"])
    with pytest.raises(ValueError, match="no low-rank pairs"):
        backbone().save_lora_weights(tmp_path / "x.lora.h5")
    model = backbone()
    model.enable_lora(2)
    with pytest.raises(ValueError, match=r"x\.h5"):
        model.save_lora_weights(tmp_path / "x.h5")


def test_keras_hubs_own_method_reaches_experts_by_name():
    model = backbone()
    keras_hub.models.Backbone.enable_lora(model, 2, target_layer_names=["experts"])
    assert {weight.name for weight in model.trainable_weights} == {
        f"{layer}_lora_{part}" for layer in ("hidden", "output") for part in "ab"
    }


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"rank": 2},
        {"rank": "two", "target_layer_names": ["query"]},
        {"rank": [1, 2], "target_layer_names": ["query"]},
        {"rank": 2, "target_layer_names": 5},
    ],
)
def test_files_of_other_things_are_named(tmp_path, attributes):
    path = tmp_path / "other.lora.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
    with pytest.raises(ValueError, match=f"target_layer_names and rank in {path}"):
        adaptation.load_pairs(None, path)


def test_pairs_in_another_file_are_not_read(tmp_path):
    path, other = tmp_path / "other.lora.h5", tmp_path / "secret"
    other.write_bytes(bytes(16))
    with h5py.File(path, "w") as file:
        file.attrs.update({"rank": 2, "target_layer_names": ["query"]})
        file.create_dataset("x", (4,), "float32", external=[(str(other), 0, 16)])
    with pytest.raises(ValueError, match=rf"{path}.*another file"):
        adaptation.load_pairs(None, path)
