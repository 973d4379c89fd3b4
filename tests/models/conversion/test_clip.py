"""CLIPs and SigLIPs of transformers and OpenCLIP have the same outputs here."""

import json

import keras
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from keras_moe import models
from keras_moe.models.preprocessing import _byte_pairs
from tests import golden, published
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.published import (
    HALF,
    IDS,
    MEAN,
    PADDING,
    STD,
    check_pair,
    open_clip_config,
    open_clip_folder,
    pixels,
    predict,
    refused,
    save_open_clip,
    state_of,
    transformers_clip,
    transformers_siglip,
    write_folder,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KEPT = PADDING.astype(bool)
IMAGES = published.PAIR_IMAGES


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


def files_of(model, folder):
    """The tensors and the config that transformers writes, under released names."""
    saved(model, folder)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def texts_of(backbone, ids=IDS):
    received = backbone({"token_ids": ids, "padding_mask": PADDING})
    return {k: keras.ops.convert_to_numpy(x) for k, x in received.items()}


@pytest.mark.parametrize("head", [False, True])
def test_dinov2(tmp_path, head):
    reference = published.transformers_dinov2()
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = reference(pixels(mean, std)).last_hidden_state
    state, config = files_of(reference, tmp_path / "source")
    if head:
        state = {f"dinov2.{name}": x for name, x in state.items()}
        state["classifier.weight"] = np.zeros((3, 16), "float32")
    scales = next(state[x] for x in state if x.endswith("layer_scale1.lambda1"))
    model, report = models.convert(write_folder(tmp_path / "x", state, config))
    received = keras.ops.convert_to_numpy(model(IMAGES))
    assert_close(received, expected, **TOLERANCE)
    assert report.scheme == "DINOv2 (transformers)"
    assert len(report.ignored) == 1 + head
    received = published.values(model, "block_0/mixer_scale/scale")
    assert_same(received, scales)
    assert model.get_config()["layer_scale_initial_value"] == 1.0


SWIGLU = {"use_swiglu_ffn": True, "mlp_ratio": 3}
DINOS = {
    "DINOv2": {"use_mask_token": False},
    "DINOv3": {},
    "DINOv3, gated": {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True},
    "DINOv2 with registers": {"registers": True},
    "DINOv2, gated": SWIGLU,
    "DINOv2 with registers, gated": {"registers": True, **SWIGLU},
}


@pytest.mark.parametrize("name", every_backend_for(DINOS, "DINOv3"))
def test_dinos_with_registers_and_gates(tmp_path, name):
    """In, with other images than in training, and back out with the same tensors."""
    reference = getattr(published, f"transformers_{name[:6].lower()}")(**DINOS[name])
    reference.save_pretrained(tmp_path / "source")
    content = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path = tmp_path / "source" / "preprocessor_config.json"
    path.write_text(json.dumps(content))
    model = models.from_preset(str(tmp_path / "source"))
    with torch.no_grad():
        expected = reference(pixels()).last_hidden_state
    received = keras.ops.convert_to_numpy(model(IMAGES))
    assert np.abs(expected.numpy()).max() > 0.1
    assert_close(received, expected, **TOLERANCE)
    if name.startswith("DINOv3"):
        # Rotary positions fit any grid.
        wide = np.tile(IMAGES, (1, 1, 2, 1))
        other = models.from_preset(str(tmp_path / "source"), image_shape=wide.shape[1:])
        with torch.no_grad():
            expected = reference(torch.cat([pixels()] * 2, dim=3)).last_hidden_state
        received = keras.ops.convert_to_numpy(other(wide))
        assert_close(received, expected, **TOLERANCE)
    models.export_weights(model, "transformers", tmp_path / "exported")
    again = published.read_back(type(reference), tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    state = reference.state_dict()
    for key, value in again.state_dict().items():
        # Not for images: transformers' classes need one.
        if key != "embeddings.mask_token":
            assert_same(value, state[key])


@pytest.mark.every_backend
def test_siglip2_of_any_image_shape(tmp_path):
    """NaFlex's towers, in and back out with the same tensors."""
    reference = published.transformers_siglip2()
    reference.save_pretrained(tmp_path / "source")
    model = models.from_preset(str(tmp_path / "source"))
    generator = np.random.default_rng(0)
    grids = np.array([[2, 3], [4, 4], [1, 1], [5, 2]][: len(IDS)])
    mask = np.arange(16) < grids.prod(axis=1)[:, None]
    patches = generator.uniform(-1, 1, (*mask.shape, 48)).astype("float32")
    ids = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
    with torch.no_grad():
        expected = reference(*map(torch.tensor, (IDS, patches, mask, grids)))
    images = {"patches": patches, "grids": grids}
    received = model.predict({**images, **ids}, verbose=0)
    for name, own in (("image_embeds", "image"), ("text_embeds", "text")):
        assert_close(received[f"{own}_embeddings"], expected[name], **TOLERANCE)
    logits = model.similarity(images, ids)
    assert_close(logits, expected.logits_per_image, **TOLERANCE)
    assert model.image_preprocessor.max_patches == 16
    models.export_weights(model, "transformers", tmp_path / "exported")
    again = type(reference).from_pretrained(tmp_path / "exported")
    for key, value in again.state_dict().items():
        assert_same(value, reference.state_dict()[key])
    # For images of one shape, the same weights.
    fixed = models.from_preset(str(tmp_path / "source"), max_patches=None)
    pixels_of = patches[1].reshape(4, 4, 4, 4, 3).swapaxes(1, 2).reshape(1, 16, 16, 3)
    own = fixed.encode_images(pixels_of)[0]
    assert_close(own, received["image_embeddings"][1], **TOLERANCE)


@pytest.mark.every_backend
@pytest.mark.parametrize("registers", [False, True])
def test_dinov2_at_the_size_of_its_preprocessor(tmp_path, registers):
    """As at 224 pixels with positions of 518: a grid of 16 in place of 37."""
    sizes = {"image_size": 74, "patch_size": 2, "num_hidden_layers": 1}
    reference = published.transformers_dinov2(registers, **sizes)
    reference.save_pretrained(tmp_path)
    content = {"crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 37}}
    content |= {"image_mean": HALF, "image_std": HALF}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    model, report = models.convert(str(tmp_path))
    assert model.image_shape == (32, 32, 3)
    assert report.arguments["image_shape"] == (74, 74, 3)
    for shape in ((32, 32, 3), (12, 30, 3), (160, 160, 3)):
        images = published.random_images(shape, 1)
        model = models.from_preset(str(tmp_path), image_shape=shape)
        with torch.no_grad():
            expected = reference(torch.tensor(images.transpose(0, 3, 1, 2)))
        assert_close(predict(model, images), expected.last_hidden_state, **TOLERANCE)
    classifier = models.from_preset(str(tmp_path), num_classes=2)
    assert classifier.preprocessor.image_shape == (32, 32, 3)
    assert classifier.preprocessor.center_crop == 32 / 37


@pytest.mark.parametrize(
    "kind", every_backend_for(["vocab.json", "tokenizer.json"], "tokenizer.json")
)
def test_a_photo_and_names_of_classes(tmp_path, kind):
    """A folder as OpenAI's on the hub: logits of photo and texts by transformers."""
    transformers = pytest.importorskip("transformers")
    pairs = _byte_pairs.trained_byte_pairs(
        ["a photo of a cat", "a photo of a dog"], 530
    )
    size = len(pairs.vocabulary)
    sizes = {"vocab_size": size, "max_position_embeddings": 24}
    reference = transformers_clip(end_of_text_id=size - 1, **sizes)
    folder = saved(reference, tmp_path)
    merges = [tuple(merge.split()) for merge in pairs.merges]
    tokenizer = transformers.CLIPTokenizer(vocab=pairs.vocabulary, merges=merges)
    if kind == "vocab.json":
        (tmp_path / kind).write_text(json.dumps(pairs.vocabulary))
        lines = ["#version: 0.2", *pairs.merges]
        (tmp_path / "merges.txt").write_text("\n".join(lines))
    else:
        tokenizer.backend_tokenizer.save(str(tmp_path / kind))
    processor = {
        "image_mean": MEAN.tolist(), "image_std": STD.tolist(), "resample": 3,
        "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    photo = np.random.default_rng(0).integers(0, 255, (8, 11, 3), "uint8")
    texts = [f"a photo of a {name}" for name in ("cat", "dog", "fox")]

    clip = models.from_preset(folder)
    received = clip.similarity(Image.fromarray(photo), texts)

    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    # The centre of a photo as high as the model's images; nothing is resized.
    pixels = (photo[:, 2:10] / 255 - MEAN) / STD
    pixels = torch.tensor(pixels.transpose(2, 0, 1)[None], dtype=torch.float32)
    with torch.no_grad():
        expected = reference(pixel_values=pixels, **tokens).logits_per_image
    assert_close(received, expected, 1e-4, 1e-4)
    clip.save_to_preset(tmp_path / "saved")
    again = models.from_preset(tmp_path / "saved")
    assert_close(again.similarity(photo, texts), received, 1e-5)
    resized = models.from_preset(folder, image_shape=(16, 16, 3))
    assert resized.encode_images(photo).shape == (1, 4)


SCALED = {"ls_init_value": 0.1}
OPEN_CLIPS = [
    ({}, {}, {"quick_gelu": True}), (SCALED, SCALED, {}),
    (
        {
            "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
            "act_kwargs": {"approximate": "tanh"},
            "mlp_ratio": 3.0,
        },
        {},
        {"custom_text": True, "init_logit_bias": -10.0},
    ),
    ({"pool_type": "eos", "eos_id": 9}, {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "image", "model"), OPEN_CLIPS)
def test_pairs_of_open_clip(tmp_path, text, image, model):
    config = open_clip_config(text, image, **model)
    reference = published.open_clip_model(config)
    ids = np.where(IDS == 19, 9, IDS) if "eos_id" in text else IDS
    normalized, token_ids = pixels(MEAN, STD), torch.tensor(ids)
    with torch.no_grad():
        images = reference.encode_image(normalized)
        texts = reference.encode_text(token_ids)
        logits = reference.get_logits(normalized, token_ids)[0]
    folder = save_open_clip(reference, config, tmp_path)
    check_pair(models.from_preset(folder).backbone, images, texts, logits, ids)
    text = models.TextBackbone.from_preset(folder)
    assert_close(texts_of(text, ids)["pooled"], texts, **TOLERANCE)


# What OpenCLIP's own configs spell out.
DEFAULTS = {
    "pool_type": "tok", "pos_embed_type": "learnable", "no_ln_pre": False,
    "act_kwargs": {},
    "norm_kwargs": None, "output_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["open_clip", "file", "transformers"])
def test_image_towers_of_clip(tmp_path, kind):
    overrides = {}
    if kind == "transformers":
        reference = transformers_clip()
        source = saved(reference, tmp_path)
        with torch.no_grad():
            outputs = reference.get_image_features(pixels(MEAN, STD))
        expected = getattr(outputs, "pooler_output", outputs)
    else:
        config = open_clip_config(image=DEFAULTS, quick_gelu=True)
        reference = published.open_clip_model(config)
        cfg = {"mean": MEAN.tolist(), "std": STD.tolist()}
        source = save_open_clip(reference, config, tmp_path, **cfg)
        with torch.no_grad():
            expected = reference.encode_image(pixels(MEAN, STD))
    if kind == "file":
        (tmp_path / "open_clip_config.json").unlink()
        source = f"{source}/open_clip_model.safetensors"
        overrides = {"activation": "quick_gelu", "num_heads": 2}
    model, report = models.convert(source, tower="image", **overrides)
    assert_close(predict(model, IMAGES), expected, **TOLERANCE)
    assert model.backbone.get_config()["activation"] == "quick_gelu"
    assert "of the text tower" in report.ignored.values()
    assert "normalisation" in report.notes[0]


@pytest.mark.parametrize(("preprocessor", "seen"), [
    ({"do_normalize": True, "do_rescale": True}, lambda p: (p - MEAN) / STD),
    ({"do_normalize": False, "image_mean": HALF}, lambda p: p),
    ({"do_rescale": False, "image_mean": [100.0] * 3, "image_std": [50.0] * 3},
     lambda p: (255 * p - 100) / 50),
    ({"do_rescale": False, "do_normalize": False}, lambda p: 255 * p),
])  # fmt: skip
def test_what_transformers_preprocessor_leaves_out(tmp_path, preprocessor, seen):
    reference = transformers_clip("CLIPVisionModelWithProjection")
    source = saved(reference, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    normalized = seen((IMAGES + 1) / 2).transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = reference(torch.tensor(normalized, dtype=torch.float32))
    actual = predict(models.convert(source)[0], IMAGES)
    assert_close(actual, expected.image_embeds, 1e-3, 1e-3)


@pytest.mark.parametrize(("cls", "end", "activation"), [
    ("CLIPTextModelWithProjection", 19, "quick_gelu"),
    ("CLIPTextModel", 2, "gelu"),
    ("SiglipTextModel", None, "gelu_tanh"),
])  # fmt: skip
def test_texts_of_transformers(tmp_path, cls, end, activation):
    is_clip = cls.startswith("CLIP")
    ids, mask = torch.tensor(IDS), torch.tensor(PADDING)
    if is_clip:
        reference = transformers_clip(cls, end, activation)
    else:
        reference, mask = transformers_siglip(cls), None
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask)
    backbone, report = models.convert(saved(reference, tmp_path))
    received = texts_of(backbone)
    kept = KEPT if is_clip else slice(None)
    tokens = expected.last_hidden_state.numpy()[kept]
    assert_close(received["tokens"][kept], tokens, **TOLERANCE)
    pooled = expected.get("text_embeds", expected.get("pooler_output"))
    assert_close(received["pooled"], pooled.numpy(), **TOLERANCE)
    config = backbone.get_config()
    assert config["end_of_text_id"] == (None if end == 2 else end)
    assert config["activation"] == activation
    assert not report.ignored


def test_texts_of_open_clip_without_projection(tmp_path):
    text = {"pool_type": "first", "proj_type": "none"}
    config = open_clip_config(text, custom_text=True)
    reference = published.open_clip_model(config)
    with torch.no_grad():
        expected = reference.encode_text(torch.tensor(IDS))
    folder = save_open_clip(reference, config, tmp_path)
    backbone = models.TextBackbone.from_preset(folder)
    assert_close(texts_of(backbone)["pooled"], expected, **TOLERANCE)


def test_classes_take_their_towers(tmp_path):
    folder = saved(transformers_clip(), tmp_path)
    text = models.TextBackbone.from_preset(folder)
    assert isinstance(models.ViTBackbone.from_preset(folder), models.ViTBackbone)
    same, report = models.convert(folder, tower="text")
    assert_same(texts_of(same)["pooled"], texts_of(text)["pooled"])
    reasons = {"of the image tower", "of the logits of pairs"}
    assert set(report.ignored.values()) == reasons
    assert isinstance(models.from_preset(folder, num_classes=3), models.ImageClassifier)


def test_a_missing_tower_is_reported(tmp_path):
    reference = transformers_clip()
    state, config = state_of(reference), reference.config.to_dict()
    for kept, missing in (("vision_model.", "text"), ("text_model.", "image")):
        part = {k: v for k, v in state.items() if k.startswith(kept)}
        folder = write_folder(tmp_path / missing, part, config)
        model, report = models.convert(folder)
        assert type(model).__name__ in ("ViTBackbone", "TextBackbone")
        assert any(f"the {missing} tower is missing" in x for x in report.notes)
    with pytest.raises(ValueError, match="image tower"):
        models.ViTBackbone.from_preset(folder)


@pytest.mark.parametrize("case", ["vit_token", "vit_qk_norm_map"])
def test_an_image_tower_of_timm_in_open_clip(tmp_path, case):
    arrays, info = golden.load(f"12_timm/{case}")
    tensors = {
        f"visual.trunk.{name}": value
        for name, value in published.part(arrays, "state_dict/").items()
        if not name.startswith("head.")
    }
    size, is_map = tensors["visual.trunk.pos_embed"].shape[2], case.endswith("map")
    text = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
    config = open_clip_config(text, init_logit_bias=-10.0, custom_text=True)
    config["embed_dim"] = size if is_map else 5
    other = state_of(published.open_clip_model(config))
    tensors.update({k: v for k, v in other.items() if "visual." not in k})
    expected = arrays["outputs/pre_logits"]
    if not is_map:
        projection = np.random.default_rng(0).normal(size=(5, size)).astype("float32")
        tensors["visual.head.proj.weight"] = projection
        expected = expected @ projection.T
    config["vision_cfg"] = {
        "timm_model_name": "test_vit",
        "timm_pool": "map" if is_map else "token",
        "timm_proj": "none" if is_map else "linear",
    }
    content = {"model_cfg": config, "preprocess_cfg": {"mean": HALF, "std": HALF}}
    folder = write_folder(tmp_path, tensors, open_clip_config=content)
    # No pair has norms of queries and keys in the blocks only.
    heads = {"num_heads": info["kwargs"]["num_heads"]}
    overrides = {"tower": "image", **heads} if is_map else {"image": heads}
    model, report = models.convert(folder, **overrides)
    if not is_map:
        assert report.ignored == {}
        model = model.backbone.encoder("image")
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    received = predict(model, arrays["inputs/images"])
    assert_close(received, expected, 1e-4, 1e-4)


@pytest.mark.parametrize(("content", "interpolation", "center_crop"), [
    ({}, "bicubic", 1.0),
    ({"resample": 2, "size": 40, "crop_size": 32}, "bilinear", 0.8),
    ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32},
      "do_center_crop": True}, "bicubic", 0.8),
    ({"size": {"height": 32, "width": 32}}, "bicubic", None),
])  # fmt: skip
def test_preprocessors_of_transformers(tmp_path, content, interpolation, center_crop):
    folder = saved(transformers_clip("CLIPVisionModelWithProjection"), tmp_path)
    if content:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    actual = models.convert(folder, load_weights=False)[0].preprocessor
    assert (actual.interpolation, actual.center_crop) == (interpolation, center_crop)
    assert (actual.mean, actual.std) == ((0.5,), (0.5,))


@pytest.mark.parametrize(("mode", "center_crop"), [(None, 1.0), ("squash", None)])
def test_preprocessors_of_open_clip(tmp_path, mode, center_crop):
    folder = open_clip_folder(tmp_path)
    path = tmp_path / "open_clip_config.json"
    cfg = {"interpolation": "bilinear", "resize_mode": mode}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"preprocess_cfg": cfg}))
    model = models.convert(folder, tower="image", load_weights=False)[0]
    actual = model.preprocessor
    assert (actual.interpolation, actual.center_crop) == ("bilinear", center_crop)


def transformers_folder(folder, **vision):
    """A CLIP whose config describes its image tower only."""
    config = {"vision_config": {"num_attention_heads": 2, **vision}}
    return write_folder(folder, state_of(transformers_clip()), config)


@pytest.mark.parametrize("text", ['{"architecture": "vit_ba', "[1]", "\xff"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(transformers_folder, "config"), (open_clip_folder, "open_clip_config")],
)
def test_a_damaged_config(tmp_path, make, name, text):
    folder = make(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
    refused(folder, f"{name}.json", "truncated")


@pytest.mark.parametrize("sizes", [{"hidden_size": 16}, {"num_hidden_layers": 3}])
def test_a_config_of_another_model(tmp_path, sizes):
    ((name, value),) = sizes.items()
    refused(transformers_folder(tmp_path, **sizes), f"{name}={value}")


@pytest.mark.parametrize(("text", "image", "word"), [
    *(
        ({}, {name: value}, f"vision_cfg.{name}={value!r}")
        for name, value in {
            "pool_type": "avg",
            "act_kwargs": {"approximate": "tanh"},
            "attentional_pool": "parallel",
            "no_ln_pre": True,
            "pos_embed_type": "sin_cos_2d",
        }.items()
    ),
    *(
        ({name: value}, {}, f"text_cfg.{name}={value!r}")
        for name, value in {
            "text_arch": "modern",
            "hf_model_name": "roberta-base",
            "qk_norm": True,
            "act_kwargs": {"approximate": "erf"},
        }.items()
    ),
    ({"pool_type": "none"}, {}, "pooling='none'"),
    ({"context_length": 7}, {}, "context_length=7"),
    ({}, {"width": 16}, "width=16"),
])  # fmt: skip
def test_other_towers_of_open_clip(tmp_path, text, image, word):
    refused(open_clip_folder(tmp_path, text, image), word)


def test_what_a_file_does_not_tell(tmp_path):
    source = open_clip_folder(tmp_path) + "/open_clip_model.safetensors"
    (tmp_path / "open_clip_config.json").unlink()
    refused(source, "activation='quick_gelu'", num_heads=2)
    refused(source, "num_heads=", activation="gelu")


def test_an_end_of_text_out_of_the_vocabulary(tmp_path):
    folder = saved(transformers_clip("CLIPTextModel", 49407), tmp_path)
    refused(folder, "eos_token_id=49407")
    backbone = models.from_preset(folder, end_of_text_id=None)
    assert backbone.get_config()["end_of_text_id"] is None
