"""Converted weights bring what their publisher says of the images."""

import json

import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import ImagePreprocessor
from tests.models.conversion.test_conversion import (
    CHECKPOINTS,
    as_transformers,
    clip_tensors,
    hub_vit,
    timm_folder,
)
from tests.models.conversion.writers import write_folder

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("op_by_op")]

NAMES = [f"class {i}" for i in range(7)]


def preprocessor_of(source, **overrides):
    return models.convert(source, load_weights=False, **overrides)[0].preprocessor


def test_googles_images_are_whole_and_in_the_range_of_ours():
    actual = preprocessor_of(str(CHECKPOINTS / "vit_classic.npz"))
    assert actual == ImagePreprocessor((32, 32, 3))
    mixer = preprocessor_of(str(CHECKPOINTS / "mixer.npz"), num_classes=2)
    assert mixer == ImagePreprocessor(mixer.image_shape)


@pytest.mark.parametrize("place", ["label_names", "pretrained_cfg", "id2label"])
def test_timms(tmp_path, place):
    labels = {
        "label_names": NAMES,
        "pretrained_cfg": NAMES,
        "id2label": {str(i): name for i, name in enumerate(NAMES)},
    }[place]
    cfg = {
        "input_size": [3, 32, 32],
        "mean": [0.4, 0.5, 0.3],
        "std": [0.2, 0.3, 0.25],
        "interpolation": "bilinear",
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    config = {place: labels}
    if place == "pretrained_cfg":
        config = {}
        cfg["label_names"] = labels
    folder = timm_folder(tmp_path, "vit_token", pretrained_cfg=cfg, **config)
    # The normalisation has become part of the patch embedding.
    expected = ImagePreprocessor(
        (32, 32, 3), 0.5, 0.5, "bilinear", True, 0.9, class_names=NAMES
    )
    assert preprocessor_of(folder) == expected
    other = preprocessor_of(folder, num_classes=3, image_shape=(48, 32, 1))
    assert other.class_names is None
    assert other.image_shape == (48, 32, 1)
    assert other.center_crop == 0.9
    assert preprocessor_of(folder, preprocessor=None) is None


@pytest.mark.parametrize(
    ("cfg", "interpolation", "center_crop"),
    [
        ({}, "bicubic", 0.875),
        ({"crop_pct": 1.0, "crop_mode": "squash"}, "bicubic", None),
        ({"interpolation": "lanczos", "crop_pct": 1.1}, "bicubic", 1.0),
        ({"interpolation": None, "crop_pct": None}, "bicubic", 0.875),
    ],
)
def test_what_else_timm_says(tmp_path, cfg, interpolation, center_crop):
    cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, **cfg}
    folder = timm_folder(tmp_path, "vit_token", pretrained_cfg=cfg)
    model, report = models.convert(folder, load_weights=False)
    assert model.preprocessor.interpolation == interpolation
    assert model.preprocessor.center_crop == center_crop
    assert any("lanczos" in x for x in report.notes) == ("lanczos" in cfg.values())


@pytest.mark.parametrize(
    ("content", "interpolation", "center_crop"),
    [
        ({}, "bicubic", 1.0),
        ({"resample": 2, "size": 40, "crop_size": 32}, "bilinear", 0.8),
        (
            {
                "size": {"shortest_edge": 40},
                "crop_size": {"height": 32, "width": 32},
                "do_center_crop": True,
            },
            "bicubic",
            0.8,
        ),
        ({"size": {"height": 32, "width": 32}}, "bicubic", None),
        ({"size": 40, "crop_size": 32, "do_center_crop": False}, "bicubic", 1.0),
    ],
)
def test_transformers(tmp_path, content, interpolation, center_crop):
    config = {"vision_config": {"hidden_act": "gelu", "num_attention_heads": 2}}
    folder = write_folder(
        tmp_path,
        as_transformers(clip_tensors()),
        config,
        preprocessor_config=content or None,
    )
    actual = preprocessor_of(folder, tower="image")
    assert (actual.interpolation, actual.center_crop) == (interpolation, center_crop)
    assert (actual.mean, actual.std) == ((0.5,), (0.5,))


@pytest.mark.parametrize(("mode", "center_crop"), [(None, 1.0), ("squash", None)])
def test_openclips(tmp_path, mode, center_crop):
    cfg = {"interpolation": "bilinear", "resize_mode": mode}
    content = {"model_cfg": {"quick_gelu": True}, "preprocess_cfg": cfg}
    folder = write_folder(tmp_path, clip_tensors(), open_clip_config=content)
    actual = preprocessor_of(folder, tower="image", num_heads=2)
    assert (actual.interpolation, actual.center_crop) == ("bilinear", center_crop)


def hub_task(**converter):
    converter = keras_hub.layers.ViTImageConverter(image_size=(8, 12), **converter)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    return keras_hub.models.ViTImageClassifier(hub_vit(), 3, preprocessor=preprocessor)


@pytest.mark.parametrize("per_channel", [False, True])
def test_kerashubs(per_channel):
    scale, offset = 1 / 127.5, -1.0
    if per_channel:
        scale, offset = [1 / 51, 1 / 102, 1 / 255], [-2.0, -1.0, 0.0]
    task = hub_task(scale=scale, offset=offset, crop_to_aspect_ratio=False)
    model, report = models.convert(task)
    photo = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype="uint8")
    expected = np.asarray(task.preprocessor(photo))
    np.testing.assert_allclose(model.preprocessor(photo), expected, atol=1e-5)
    assert any("model.preprocessor" in note for note in report.notes)
    grey = preprocessor_of(task, image_shape=(8, 12, 1))
    assert grey.image_shape == (8, 12, 1)


def test_kerashubs_without_a_range():
    assert preprocessor_of(hub_task()) is None
    assert preprocessor_of(hub_vit(), num_classes=3) is None
    assert preprocessor_of(hub_task(scale=1 / 255)).center_crop == 1.0


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"label_names": "cat"}, "label_names"),
        ({"id2label": {"0": 1}}, "id2label"),
        ({"pretrained_cfg": {"crop_pct": "x"}}, "crop_pct"),
    ],
)
def test_damaged_configs_are_named(tmp_path, entry, word):
    folder = timm_folder(tmp_path, "vit_token", **entry)
    with pytest.raises(ValueError, match=word):
        models.convert(folder)


@pytest.mark.parametrize("names", [NAMES[:3], [f"LABEL_{i}" for i in range(7)]])
def test_names_of_other_heads_are_left(tmp_path, names):
    folder = timm_folder(tmp_path, "vit_token", label_names=names)
    assert preprocessor_of(folder).class_names is None


def test_a_converted_preset_classifies(tmp_path):
    folder = timm_folder(tmp_path / "timm", "vit_token", label_names=NAMES)
    model = models.from_preset(folder)
    model.save_to_preset(tmp_path / "ours")
    again = models.from_preset(str(tmp_path / "ours"))
    assert json.dumps(again.preprocessor.get_config())
    photo = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype="uint8")
    assert again.classify(photo, top=2) == model.classify(photo, top=2)
    assert again.classify(photo)[0].name in NAMES
