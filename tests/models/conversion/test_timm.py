"""timm's models have the same outputs here, or are refused by name."""

import json

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from keras_moe import models
from keras_moe.models import ImagePreprocessor
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.published import predict, refused, timm_folder, values, write_folder
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NAMES = [f"class {i}" for i in range(7)]


def check_logits(folder, case, images=None):
    """Converts a folder, and compares with the golden logits of a case."""
    arrays, _ = golden.load(f"12_timm/{case}")
    model, report = models.convert(folder)
    images = arrays["inputs/images"] if images is None else images
    expected = arrays["outputs/logits"]
    assert_close(predict(model, images), expected, **TOLERANCE)
    return model, report


@pytest.mark.parametrize(
    "case", ["vit_token", "vit_avg", "mixer", "vit_qk_norm", "vit_qk_norm_map"]
)
def test_logits(tmp_path, case):
    arrays, _ = golden.load(f"12_timm/{case}")
    model, report = check_logits(timm_folder(tmp_path, case), case)
    assert models.describe(model).parameters == model.count_params()
    assert report.scheme.endswith("(timm)")
    features = keras.Model(model.input, [model.backbone.output, model.features])
    encoded, pooled = predict(features, arrays["inputs/images"])
    assert_close(encoded, arrays["outputs/forward_features"], **TOLERANCE)
    assert_close(pooled, arrays["outputs/pre_logits"], **TOLERANCE)


@pytest.mark.parametrize("case", ["vit_token", "mixer"])
def test_the_normalisation_of_images_is_kept(tmp_path, case):
    arrays, _ = golden.load(f"12_timm/{case}")
    mean, std = np.array([0.4, 0.5, 0.3]), np.array([0.2, 0.3, 0.25])
    folder = timm_folder(tmp_path, case, mean.tolist(), std.tolist())
    # timm sees (pixels in [0, 1] - mean) / std.
    images = 2 * (arrays["inputs/images"] * std + mean) - 1
    _, report = check_logits(folder, case, images)
    assert "mean=(0.4, 0.5, 0.3)" in report.notes[0]
    preprocessor = tmp_path / "preprocessor_config.json"
    preprocessor.write_text(json.dumps({"do_normalize": False}))
    _, report = check_logits(folder, case, 2 * arrays["inputs/images"] - 1)
    assert "mean=(0.0, 0.0, 0.0) and std=(1.0, 1.0, 1.0)" in report.notes[0]


def test_layer_scale_is_a_layer(tmp_path):
    generator = np.random.default_rng(0)
    gammas = {}

    def change(tensors):
        for block in "01":
            for layer, scale in (("attn.proj", "ls1"), ("mlp.fc2", "ls2")):
                name = f"blocks.{block}.{layer}"
                gamma = generator.uniform(0.5, 2.0, 32).astype("float32")
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / gamma[:, None]
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"] / gamma
                tensors[f"blocks.{block}.{scale}.gamma"] = gammas[block, scale] = gamma

    folder = timm_folder(tmp_path, "vit_token", change=change)
    model, _ = check_logits(folder, "vit_token")
    assert model.backbone.get_config()["layer_scale_initial_value"] == 1e-5
    received = values(model, "block_1/mixer_scale/scale")
    assert_same(received, gammas["1", "ls1"])
    received = values(model, "block_0/feed_forward_scale/scale")
    assert_same(received, gammas["0", "ls2"])
    # OpenCLIP and DINOv2 have other names for the same.
    models.export_weights(model.backbone, "transformers", tmp_path / "dinov2")
    again = models.from_preset(str(tmp_path / "dinov2"))
    for weight in again.weights:
        expected = values(model, weight.path)
        assert_same(values(again, weight.path), expected)


def test_positions_without_a_row_for_the_class_token(tmp_path):
    def change(tensors):
        # The row's part moves into the token itself.
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]

    check_logits(timm_folder(tmp_path, "vit_token", change=change), "vit_token")


@pytest.mark.parametrize(("architecture", "activation", "epsilon"), [
    ("vit_base_patch16_clip_quickgelu_224", "quick_gelu", 1e-5),
    ("vit_base_patch16_siglip_224", "gelu", 1e-6),
    ("vit_so400m_patch16_siglip_256", "gelu_tanh", 1e-6),
])  # fmt: skip
def test_what_only_the_name_tells(tmp_path, architecture, activation, epsilon):
    folder = timm_folder(tmp_path, "vit_token", architecture=architecture)
    _, report = models.convert(folder, load_weights=False)
    assert report.arguments["activation"] == activation
    assert report.arguments["layer_norm_epsilon"] == epsilon


def test_what_is_assumed_without_a_config_is_reported(tmp_path):
    folder = timm_folder(tmp_path, "vit_token")
    assert not models.convert(folder)[1].notes
    (tmp_path / "config.json").unlink()
    # 32 dimensions are no usual size.
    refused(folder, "num_heads=")
    _, report = models.convert(folder, load_weights=False, num_heads=4)
    assert all(note.startswith("assumed: ") for note in report.notes)
    assumed = "\n".join(report.notes)
    for word in ("mean=0.5", "layer_norm_epsilon=1e-06", "pooling: the class token"):
        assert word in assumed
    assert "num_heads" not in assumed


def preprocessor_of(source, **overrides):
    return models.convert(source, load_weights=False, **overrides)[0].preprocessor


@pytest.mark.parametrize("place", ["label_names", "pretrained_cfg", "id2label"])
def test_class_names_and_preprocessor(tmp_path, place):
    cfg = {
        "input_size": [3, 32, 32], "mean": [0.4, 0.5, 0.3], "std": [0.2, 0.3, 0.25],
        "interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "center",
    }  # fmt: skip
    config = {
        "label_names": {"label_names": NAMES},
        "pretrained_cfg": {},
        "id2label": {"id2label": {str(i): name for i, name in enumerate(NAMES)}},
    }[place]
    if place == "pretrained_cfg":
        cfg["label_names"] = NAMES
    folder = timm_folder(tmp_path, "vit_token", pretrained_cfg=cfg, **config)
    # The normalisation has become part of the patch embedding.
    options = {"antialias": True, "center_crop": 0.9, "class_names": NAMES}
    expected = ImagePreprocessor((32, 32, 3), 0.5, 0.5, "bilinear", **options)
    assert preprocessor_of(folder) == expected
    other = preprocessor_of(folder, num_classes=3, image_shape=(48, 32, 1))
    assert other.class_names is None
    assert other.image_shape == (48, 32, 1)
    assert other.center_crop == 0.9
    assert preprocessor_of(folder, preprocessor=None) is None


@pytest.mark.parametrize(("cfg", "interpolation", "center_crop"), [
    ({}, "bicubic", 0.875),
    ({"crop_pct": 1.0, "crop_mode": "squash"}, "bicubic", None),
    ({"interpolation": "lanczos", "crop_pct": 1.1}, "bicubic", 1.0),
])  # fmt: skip
def test_crop_and_interpolation(tmp_path, cfg, interpolation, center_crop):
    cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, **cfg}
    folder = timm_folder(tmp_path, "vit_token", pretrained_cfg=cfg)
    model, report = models.convert(folder, load_weights=False)
    assert model.preprocessor.interpolation == interpolation
    assert model.preprocessor.center_crop == center_crop
    assert any("lanczos" in x for x in report.notes) == ("lanczos" in cfg.values())


def test_names_of_other_heads_are_left(tmp_path):
    names = [f"LABEL_{i}" for i in range(7)]
    folder = timm_folder(tmp_path, "vit_token", label_names=names)
    assert preprocessor_of(folder).class_names is None


def test_other_architectures(tmp_path):
    architecture = "vit_pe_core_base_patch16_224"
    folder = timm_folder(tmp_path / "x", "vit_token", architecture=architecture)
    refused(folder, f"architecture={architecture!r}")
    # Without a config the folder's name tells.
    folder = timm_folder(tmp_path / architecture, "vit_token")
    (tmp_path / architecture / "config.json").unlink()
    refused(folder, architecture)


@pytest.mark.parametrize(("removed", "added", "words"), [
    (None, "reg_token", ["1 left over", "reg_token"]),
    (None, "blocks.0.attn.q_norm.weight", ["blocks.0.attn.q_norm.bias"]),
    ("head.", None, ["num_classes=7", "received: 0"]),
    ("blocks.1.", None, ["depth=2", "received: 1"]),
])  # fmt: skip
def test_tensors_of_other_models(tmp_path, removed, added, words):
    def change(tensors):
        if added:
            tensors[added] = np.ones(8, "float32")
        for name in [x for x in tensors if removed and x.startswith(removed)]:
            del tensors[name]

    refused(timm_folder(tmp_path, "vit_token", change=change), *words)


@pytest.mark.parametrize(("config", "word"), [
    ({"global_pool": "max"}, "global_pool='max'"),
    ({"mean": [0.5], "std": [0.5]}, "3 channels"),
    ({"model_args": {"num_heads": 4, "block_fn": "parallel"}}, "block_fn"),
    ({"act_layer": "silu"}, "act_layer='silu'"),
])  # fmt: skip
def test_configs_of_other_models(tmp_path, config, word):
    refused(timm_folder(tmp_path, "vit_token", **config), word)


@pytest.mark.parametrize(
    ("name", "value"), [("embed_dim", 48), ("depth", 3), ("num_classes", 9)]
)
def test_sizes_are_those_of_the_tensors(tmp_path, name, value):
    folder = timm_folder(tmp_path, "vit_token")
    content = json.loads((tmp_path / "config.json").read_text())
    content["model_args"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    refused(folder, f"{name}={value}", "as config.json says", "model.safetensors")


def test_names_of_no_known_model(tmp_path):
    folder = write_folder(tmp_path, {"layer1.weight": np.zeros(3)})
    refused(folder, "layer1.weight", "the names of a ViT")


DINOV3 = ["dinov3", "dinov3_gated", "lingbot"]


@pytest.mark.parametrize("case", every_backend_for(DINOV3, "dinov3_gated"))
def test_dinov3_in_and_out(tmp_path, case):
    """LingBot's is the same layout; all but the first have biases of queries."""
    arrays, info = golden.load(f"12_timm/{case}")
    config = {name: info[name] for name in ("architecture", "global_pool")}
    folder = timm_folder(tmp_path / "source", case, **config, num_classes=None)
    for end in ("", "_wide"):
        images = arrays[f"inputs/{end[1:] or 'images'}"]
        model = models.from_preset(folder, image_shape=images.shape[1:])
        backbone = getattr(model, "backbone", model)
        expected = arrays[f"outputs/forward_features{end}"]
        assert_close(predict(backbone, images), expected, 1e-5, 1e-5)
        if model is not backbone:
            assert_close(predict(model, images), arrays[f"outputs/logits{end}"], 1e-5)
    model = models.from_preset(folder)
    models.export_weights(model, "timm", tmp_path / "exported")
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    expected = golden.part(arrays, "state_dict/")
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(tensors[name], value)
    content = json.loads((tmp_path / "exported" / "config.json").read_text())
    # As timm's own models are made, so that it reads them.
    expected = {"mlp_ratio": 4.0, **info["kwargs"]}
    received = {**content["model_args"], "num_classes": content["num_classes"]}
    assert {name: received[name] for name in expected} == expected
    assert received["qkv_bias"] == (case != "dinov3")
    again = models.from_preset(str(tmp_path / "exported"))
    images = arrays["inputs/images"]
    assert_same(predict(again, images), predict(model, images))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"key_bias": True}, "key_bias=False"),
    ({"position_embedding": "learned"}, "position_embedding='rotary_2d'"),
    ({"moe": {"moe_layers": [0], "num_experts": 2}}, "moe="),
])  # fmt: skip
def test_what_timms_dinov3_has_not(tmp_path, arguments, message):
    sizes = {
        "image_shape": (8, 8, 3), "patch_size": 4, "hidden_dim": 8, "num_layers": 1,
        "num_heads": 1, "mlp_dim": 8, "register_tokens": 1, "key_bias": False,
        "position_embedding": "rotary_2d", "layer_norm_epsilon": 1e-5,
        "activation": "gelu", "layer_scale_initial_value": 1e-5,
    }  # fmt: skip
    backbone = models.ViTBackbone(**{**sizes, **arguments})
    refuses(message, models.export_weights, backbone, "timm", tmp_path / "x")
