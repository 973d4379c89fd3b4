"""SigLino's encoders, and the features of its teachers, by its released code."""

import json

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

from keras_moe import models, training
from keras_moe.models.conversion.sources import open_source
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.refusals import refuses
from tests.training_gradients import training_gradients

CASES = golden.cases("19_siglino/*")
MOE, DENSE = "19_siglino/moe_top2", "19_siglino/dense_plain_norm"
PADDED = "19_siglino/moe_padded"
TEACHERS = ("siglip2", "dinov3")


def released(case, folder, changes=None, **config):
    """The folder of a release, its images and the arrays that its code gave."""
    arrays, stored = golden.load(case)
    tensors = {**golden.part(arrays, "state_dict/"), **(changes or {})}
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**stored, **config}))
    shapes, size = arrays["inputs/spatial_shapes"], stored["patch_size"]
    # One image of those of other shapes: its padding attends to nothing.
    count = len(shapes) if (shapes == shapes[0]).all() else 1
    rows, columns = (int(x) for x in shapes[0])
    patches = arrays["inputs/patches"][:count, : rows * columns]
    images = patches.reshape(count, rows, columns, size, size, 3)
    images = images.transpose(0, 1, 3, 2, 4, 5)
    return images.reshape(count, rows * size, columns * size, 3), arrays


def converted(folder, images, **options):
    shape = images.shape[1:]
    return models.from_preset(str(folder), image_shape=shape, **options)


def features_of(model, images):
    extractor = keras.Model(model.input, model.features)
    return extractor.predict(images, verbose=0)


@pytest.mark.parametrize("case", every_backend_for(CASES, "moe_top2"))
def test_features_are_those_of_the_release(tmp_path, case):
    images, arrays = released(case, tmp_path)
    model = converted(tmp_path, images)
    assert type(model) is models.TeacherFeatures
    features, count = features_of(model, images), len(images)
    rows, columns = model.backbone.grid
    tolerance = {"rtol": 1e-4, "atol": 2e-5}
    for index in range(3):
        expected = arrays[f"outputs/hidden/{index}"][:count, : 5 + rows * columns]
        assert_close(features[f"block_{index}"], expected, **tolerance)
    names = {"siglino": ("pooled", "grid")}
    names |= {name: (name, f"{name}_grid") for name in TEACHERS}
    for name, (summary, grid) in names.items():
        expected = arrays[f"outputs/summary_features/{name}"][:count]
        assert_close(features[summary], expected, **tolerance)
        expected = arrays[f"outputs/patch_features/{name}"][:count, : rows * columns]
        received = features[grid].reshape(expected.shape)
        assert_close(received, expected, **tolerance)
    # Saved and loaded again, and described.
    model.save_to_preset(tmp_path / "preset")
    again = models.from_preset(str(tmp_path / "preset"))
    assert_same(again.predict(images, verbose=0)["siglip2"], features["siglip2"])
    trained = sum(int(np.prod(x.shape)) for x in model.trainable_weights)
    assert models.describe(model).parameters == trained


@pytest.mark.every_backend
def test_images_of_two_shapes_in_one_batch(tmp_path):
    _, arrays = released(PADDED, tmp_path)
    patches, grids = arrays["inputs/patches"], arrays["inputs/spatial_shapes"]
    model = models.from_preset(str(tmp_path), max_patches=patches.shape[1])
    assert model.preprocessor.interpolation == "bicubic"
    features = features_of(model, {"patches": patches, "grids": grids})
    real = arrays["inputs/padding_mask"].astype(bool)
    assert not real.all()
    names = {"siglino": ("pooled", "patches")}
    names |= {name: (name, f"{name}_patches") for name in TEACHERS}
    for name, (summary, kind) in names.items():
        expected = arrays[f"outputs/summary_features/{name}"]
        assert_close(features[summary], expected, 1e-4, 2e-5)
        expected = arrays[f"outputs/patch_features/{name}"]
        assert_close(features[kind][real], expected[real], 1e-4, 2e-5)


@pytest.mark.parametrize("case", every_backend_for([MOE], "moe_top2"))
def test_routing_is_that_of_the_release(tmp_path, case):
    images, arrays = released(case, tmp_path)
    model = converted(tmp_path, images, task="backbone")
    records = keras.Model(model.input, model.routing).predict(images, verbose=0)
    for index in range(3):
        gates = arrays[f"outputs/routing/{index}/gates"]
        experts = arrays[f"outputs/routing/{index}/experts"]
        record = records[f"block_{index}"]
        expected = np.zeros((len(gates), record.gates.shape[-1]), "float32")
        np.put_along_axis(expected, experts, gates, axis=1)
        assert_close(record.combined.reshape(expected.shape), expected, 1e-4, 1e-5)


@pytest.mark.parametrize("case", every_backend_for([MOE, DENSE], "moe_top2"))
def test_gradients_are_those_of_the_release(tmp_path, case):
    images, arrays = released(case, tmp_path)
    model = converted(tmp_path, images)
    names = {"siglino": ("pooled", "grid")}
    names |= {name: (name, f"{name}_grid") for name in TEACHERS}
    wanted = {x: model.features[x] for each in names.values() for x in each}
    cotangents = golden.part(arrays, "inputs/cotangent/")

    def total(outputs):
        parts = 0.0
        for name, (summary, grid) in names.items():
            for received, kind in ((summary, "summary"), (grid, "patch")):
                expected = cotangents[f"{kind}_features/{name}"]
                value = keras.ops.reshape(outputs[received], expected.shape)
                parts = parts + keras.ops.sum(keras.ops.multiply(value, expected))
        return parts

    extractor = keras.Model(model.input, wanted)
    gradients = training_gradients(extractor, images, total, training=False)
    file, spec = open_source(str(tmp_path), {})
    file.close()
    expected, seen = golden.part(arrays, "grads/"), set()
    for weight, value in zip(extractor.trainable_weights, gradients):
        rule = spec.rules[weight.path]
        for name in {*rule.names} & {*expected}:
            assert_close(rule.tensor(value), expected[name], 1e-3, 5e-5)
            seen.add(name)
    assert seen == set(expected)


def test_a_classifier_is_fine_tuned(tmp_path):
    """Its selection bias goes on from the release's."""
    images, arrays = released(MOE, tmp_path)
    model = converted(tmp_path, images, num_classes=2)
    name = "block_0/moe/router/selection_bias"
    (bias,) = (x for x in model.weights if x.path == name)
    expected = arrays["state_dict/layers.0.moe.expert_bias"]
    assert_same(bias, expected)
    model.compile("sgd")
    losses = model.fit(images, np.array([0, 1]), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    moved = np.abs(keras.ops.convert_to_numpy(bias) - expected)
    # Three steps of 0.001 at most.
    assert 0.0005 < moved.max() < 0.0031
    backbone = converted(tmp_path, images, task="backbone")
    # Fewer experts, which the bias follows.
    pruned = backbone.with_kept_experts({"block_0": [0, 2, 5]})
    (kept,) = (x for x in pruned.weights if x.path == name)
    assert_same(kept, expected[[0, 2, 5]])
    assert (
        pruned.predict(images, verbose=0).shape
        == backbone.predict(images, verbose=0).shape
    )


def test_any_size_of_image(tmp_path):
    released(DENSE, tmp_path)
    model = models.from_preset(str(tmp_path), task="backbone")
    assert model.image_shape == (64, 64, 3)
    assert models.describe(str(tmp_path), image_shape=(8, 24, 3)).num_tokens == 5 + 12


@pytest.mark.parametrize(("case", "config", "message"), [
    (MOE, {"moe": {"score_func": "softmax", "top_k": 2}}, "sigmoid scores"),
    (MOE, {"dim": 48}, "dim=48"),
    (DENSE, {"activation": "relu2"}, "activation='relu2'"),
])  # fmt: skip
def test_other_settings_are_refused(tmp_path, case, config, message):
    released(case, tmp_path, **config)
    refuses(message, models.from_preset, str(tmp_path))


def test_a_pickle_is_refused_by_name(tmp_path):
    released(MOE, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    refuses("safetensors", models.from_preset, str(tmp_path))


@pytest.mark.parametrize(("teachers", "message"), [
    ({}, "teachers={}"),
    ({"dinov3": {"dim": 4, "num_heads": 2}}, "mlp_dim=None"),
    ({"dinov3": {"dim": 4, "mlp_dim": 2}}, "mlp_dim=2"),
    ({"dinov3": {}}, "teachers={'dinov3': {}}"),
    ({"grid": {"dim": 4}}, "name='grid'"),
    ({"a": {"dim": 4}, "a_grid": {"dim": 4}}, "name='a_grid'"),
])  # fmt: skip
def test_bad_teachers(teachers, message):
    backbone = models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=1, num_heads=2,
        mlp_dim=8,
    )  # fmt: skip
    refuses(message, models.TeacherFeatures, backbone, teachers)


def test_muon_knows_the_heads(tmp_path):
    images, _ = released(MOE, tmp_path)
    teachers = converted(tmp_path, images)
    muon = training.Muon()
    shapes = {x.path: muon.matrix_shape(x) for x in teachers.trainable_weights}
    assert shapes["teacher_dinov3/output/kernel"] is None
    assert shapes["teacher_dinov3/hidden/kernel"] == (32, 24)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_half_precision_keeps_the_table_and_the_bias(tmp_path, dtype):
    images, _ = released(MOE, tmp_path)
    whole = converted(tmp_path, images, task="backbone")
    half = converted(tmp_path, images, task="backbone", dtype=dtype)
    kept = ("frequencies", "selection_bias", "expert_load", "num_passes")
    assert {x.dtype for x in half.weights if x.name in kept} == {"float32"}
    received, expected = (
        keras.ops.convert_to_numpy(keras.ops.cast(x(images), "float32"))
        for x in (half, whole)
    )
    # Eight bits, and some tokens that choose other experts.
    assert np.median(np.abs(received - expected)) < 0.02


def test_experts_are_upcycled_and_drop_upcycled(tmp_path):
    """A released dense encoder becomes sparse, with a shared expert."""
    images, _ = released(DENSE, tmp_path)
    backbone = converted(tmp_path, images, task="backbone")
    options = {"num_experts": 3, "shared_experts": 1, "gates": "sigmoid"}
    sparse, report = training.upcycle(backbone, images=images, **options)
    assert report.preserved
    assert report.largest_difference < 1e-4
    assert sparse.get_layer("block_1").feed_forward.shared_experts.gated
