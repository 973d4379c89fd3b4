"""What is frozen stays frozen in files, presets, copies and pickles."""

import copy
import pickle

import keras
import numpy as np
import pytest

from keras_moe import models, training
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same, to_numpy
from tests.models.kinds_of_models import KINDS, vit
from tests.pair_models import IDS, IMAGE, MOE, PAIRS, TEXT
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("op_by_op")

LABELS = np.array([0, 1, 2])
# Those whose layers are those of another kind here are left out.
ALIKE = {"vit", "soft_moe", "mumoe_mixer", "clip", "siglip"}
TASKS = every_backend_for(sorted(KINDS.keys() - ALIKE), "vmoe")


def batch(model):
    if isinstance(model, models.ContrastiveModel):
        return PAIRS, None
    if isinstance(model, models.CausalLM):
        return {"token_ids": IDS, "padding_mask": IDS != 0}, None
    return PAIRS["images"], LABELS


def copies(model, folder):
    """The model by each way, its weights included."""
    model.save(folder / "model.keras")
    model.save_to_preset(folder / "preset")
    made = {
        "load_model": keras.saving.load_model(folder / "model.keras"),
        "from_preset": models.from_preset(folder / "preset"),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "copy": model.copy(),
        "from_config": type(model).from_config(model.get_config()),
    }
    for new, old in zip(made["from_config"].weights, model.weights):
        new.assign(to_numpy(old))
    return made


def predicted(model):
    outputs = model.predict(batch(model)[0], verbose=0)
    return keras.tree.flatten(outputs)


def paths(weights):
    return [weight.path for weight in weights]


def moved(model):
    """The paths of the weights that a step of training changes."""
    model.compile(keras.optimizers.SGD(1.0))
    before = [to_numpy(weight).copy() for weight in model.weights]
    model.train_on_batch(*batch(model))
    changed = (
        not np.array_equal(a, to_numpy(b)) for a, b in zip(before, model.weights)
    )
    return [w.path for w, is_new in zip(model.weights, changed) if is_new]


@pytest.mark.parametrize("kind", TASKS)
def test_what_is_frozen_stays_frozen(kind, tmp_path):
    make, name = KINDS[kind]
    model = make()
    block = model.backbone.get_layer(name)
    model.backbone.trainable = False
    block.trainable = True
    block.mixer_norm.trainable = False
    of_backbone = {*paths(model.backbone.weights)}
    may_move = {*paths(block.weights)} - {*paths(block.mixer_norm.weights)}
    may_move |= {*paths(model.weights)} - of_backbone
    # The optimizer of a file has begun, too.
    moved(model)
    made, outputs = copies(model, tmp_path), predicted(model)
    for way, other in made.items():
        assert paths(other.weights) == paths(model.weights), way
        assert_same(predicted(other), outputs)
    trained, changed = paths(model.trainable_variables), moved(model)
    assert {*changed} <= may_move
    assert any(path in changed for path in paths(block.feed_forward.weights))
    for way, other in made.items():
        assert paths(other.trainable_variables) == trained, way
        inner = other.backbone.get_layer(name)
        flags = other.backbone.trainable, inner.trainable, inner.mixer_norm.trainable
        assert flags == (False, True, False), way
        assert moved(other) == changed, way


@pytest.mark.every_backend
def test_a_hand_written_list_of_what_is_trained(tmp_path):
    model = vit(**MOE)
    model.backbone.trainable = False
    block = model.backbone.get_layer("block_1")
    block.feed_forward.trainable = True
    block.feed_forward.experts.hidden_bias.trainable = False
    model.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(tmp_path / "preset")
    assert sorted(paths(loaded.trainable_variables)) == [
        "block_1/moe/experts/hidden_kernel",
        "block_1/moe/experts/output_bias",
        "block_1/moe/experts/output_kernel",
        "block_1/moe/router/kernel",
        "predictions/bias",
        "predictions/kernel",
    ]
    assert loaded.get_config()["backbone"]["config"]["frozen"] == [
        "!block_1/moe",
        "block_1/moe/experts/hidden_bias",
    ]
    # A frozen layer is one entry, and what is trained has none.
    model.backbone.trainable = True
    assert "frozen" not in model.backbone.get_config()
    # Keras's own layers, too, of which one was frozen by its weight.
    block.mixer_norm.beta.trainable = False
    block.trainable = True
    assert block.mixer_norm.beta.trainable
    block.trainable = model.output_dense.trainable = False
    assert model.backbone.get_config()["frozen"] == ["block_1"]
    assert model.get_config()["frozen"] == ["predictions"]


@pytest.mark.parametrize("kind", every_backend_for(["vmoe", "limoe"], "vmoe"))
def test_the_argument_freezes(kind):
    backbone = KINDS[kind][0]().backbone
    frozen = type(backbone)(
        **{**backbone.config.to_dict(), "trainable": False, "dtype": "float32"}
    )
    assert frozen.weights
    assert not any(weight.trainable for weight in frozen.weights)
    config = {**backbone.get_config(), "trainable": False}
    frozen = type(backbone).from_config(config)
    assert not any(weight.trainable for weight in frozen.weights)
    task = type(KINDS[kind][0]())
    if task is models.ViTImageClassifier:
        assert len(task(frozen, 3).trainable_variables) == 2
        assert task(backbone, 3, trainable=False).trainable_variables == []
        assert backbone.trainable_variables == []


SMALL_VMOE = {**IMAGE, **MOE, "load_weights": False}


def test_overrides_replace_what_a_preset_froze(tmp_path):
    model = models.from_preset("vmoe_s16", num_classes=3, trainable=False, **SMALL_VMOE)
    assert model.trainable_variables == []
    for options in ({"task": "backbone"}, {"num_classes": 3}):
        options = {**options, **SMALL_VMOE, "frozen": ["block_0", "!block_0/mlp"]}
        model = models.from_preset("vmoe_s16", **options)
        names = {x.path.rpartition("block_0/")[2] for x in model.trainable_variables}
        assert {"mlp/hidden/kernel", "patch_embedding/kernel"} < names
        assert "attention/query/kernel" not in names
    model.output_dense.trainable = False
    model.save_to_preset(tmp_path / "preset")
    every, saved = len(model.weights), len(model.trainable_variables)
    for options, count in (
        # The saved head is frozen, and a new one is not.
        ({}, saved), ({"num_classes": 5}, saved + 2), ({"trainable": True}, every),
        ({"frozen": []}, every), ({"trainable": False}, 0),
    ):  # fmt: skip
        loaded = models.from_preset(tmp_path / "preset", **options)
        assert len(loaded.trainable_variables) == count


@pytest.mark.parametrize(("frozen", "received"), [
    (["block_7"], r"'block_7' \(nearest: block_"),
    (["block_0/attention/query/kernels"], r"query/kernels' \(nearest: kernel"),
    ([3], r"frozen=\[3\]"),
])  # fmt: skip
def test_unknown_paths_are_refused(frozen, received):
    with pytest.raises(ValueError, match=f"Expected frozen.*; received: .*{received}"):
        models.ViTBackbone.from_config({**IMAGE, "frozen": frozen})
    refuses("trainable=0", models.ViTBackbone.from_config, {**IMAGE, "trainable": 0})


@pytest.mark.every_backend
def test_upcycled_and_composed_models_are_frozen_alike():
    dense = vit()
    dense.backbone.trainable = False
    dense.backbone.get_layer("block_1").trainable = True
    dense.backbone.get_layer("block_1").feed_forward.trainable = False
    sparse, _ = training.upcycle(dense, num_experts=2, moe_layers=[1])
    block = sparse.backbone.get_layer("block_1")
    assert not sparse.backbone.trainable
    # The experts are copies of a frozen layer, and the router is new.
    assert not any(x.trainable for x in block.feed_forward.experts.weights)
    assert paths(block.feed_forward.trainable_weights) == ["block_1/moe/router/kernel"]
    trained = [*paths(dense.trainable_variables), "block_1/moe/router/kernel"]
    assert sorted(paths(sparse.trainable_variables)) == sorted(trained)
    # A tower of a pair, as given and after a copy.
    tower = models.ViTBackbone(**IMAGE)
    tower.trainable = False
    tower.get_layer("block_0").mixer_norm.trainable = True
    pair = models.CLIPBackbone(
        image=tower, text={**TEXT}, projection_dim=4, image_pooling="average"
    )
    for each in (pair, pair.copy(), copy.deepcopy(pair)):
        norm, *others = [
            x for x in each.trainable_variables if x.path.startswith("image/")
        ]
        assert "mixer_norm" in norm.path
        assert {x.path.split("/")[1] for x in others} <= {"block_0", "projection"}
        assert len(others) == 2
    pair.tower_backbone("image").trainable = False
    assert not copy.deepcopy(pair).tower_backbone("image").trainable


def adapted():
    # Files do not have the state of the noise.
    model = vit(**MOE, gated_experts=True, noise_std=0.0)
    model.backbone.enable_lora(2, ["query", "value", "hidden", "experts"])
    model.output_dense.enable_lora(1, lora_alpha=3.0)
    model.compile(keras.optimizers.Adam(1e-2))
    for _ in range(3):
        model.train_on_batch(*batch(model))
    return model


@pytest.mark.every_backend
@pytest.mark.usefixtures("traced")
def test_adapters_are_trained_on_after_loading(tmp_path):
    model = adapted()
    model.save(tmp_path / "model.keras")
    others = [
        keras.saving.load_model(tmp_path / "model.keras"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    # Again from a model that was loaded.
    others[0].save(tmp_path / "again.keras")
    others.append(keras.saving.load_model(tmp_path / "again.keras"))
    for each in (model, *others):
        each.train_on_batch(*batch(each))
    expected = [*model.weights, *model.optimizer.variables]
    for other in others:
        trained = paths(other.trainable_variables)
        assert trained == paths(model.trainable_variables)
        assert len([path for path in trained if "lora" in path]) == 18
        actual = [*other.weights, *other.optimizer.variables]
        assert [x.name for x in actual] == [x.name for x in expected]
        assert_close(actual, expected, 0, 1e-06)


def test_files_of_weights_and_presets_have_no_adapters(tmp_path):
    model = adapted()
    outputs = model.predict(PAIRS["images"], verbose=0)
    model.save_to_preset(tmp_path / "preset")
    model.backbone.save_weights(tmp_path / "all.weights.h5")
    plain = vit(**MOE, gated_experts=True)
    loaded = models.from_preset(tmp_path / "preset")
    plain.backbone.load_weights(tmp_path / "all.weights.h5")
    plain.output_dense.set_weights(loaded.output_dense.get_weights())
    for other in (plain, loaded):
        assert not [x for x in paths(other.weights) if "lora" in x]
        assert len(other.trainable_variables) == len(other.weights)
    # Adapters take merged weights, and begin anew.
    model.backbone.load_weights(tmp_path / "all.weights.h5")
    for other in (plain, loaded, model):
        actual = other.predict(PAIRS["images"], verbose=0)
        assert_close(actual, outputs, 1e-4, 1e-5)


def test_int8_models_with_adapters_come_back():
    model = vit(**MOE)
    model.quantize("int8", filters="query|experts")
    model.backbone.enable_lora(2, ["query", "experts"])
    model.optimizer.build(model.trainable_variables)
    for weight in model.backbone.trainable_weights:
        weight.assign(np.random.default_rng(0).normal(size=weight.shape))
    other = copy.deepcopy(model)
    for a, b in zip(model.weights, other.weights, strict=True):
        assert (a.path, a.dtype, a.trainable) == (b.path, b.dtype, b.trainable)
        assert_same(a, b)
