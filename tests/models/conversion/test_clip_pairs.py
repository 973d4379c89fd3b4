"""CLIPs and SigLIPs of others give the same embeddings and logits in our models."""

import keras
import numpy as np
import pytest

from keras_moe import models
from tests import golden
from tests.models.conversion import clip_models
from tests.models.conversion.clip_models import IDS, PADDING
from tests.models.conversion.test_conversion import (
    MEAN,
    STD,
    hub_clip,
    hub_siglip,
    random_images,
)
from tests.models.conversion.test_conversion import randomized as hub_randomized
from tests.models.conversion.writers import write_folder, write_vmoe

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IMAGES = random_images((8, 8, 3), 3)


def pixels(mean=0.5, std=0.5):
    """The same images as PyTorch's models take them."""
    normalized = ((IMAGES + 1) / 2 - mean) / std
    return torch.tensor(normalized.transpose(0, 3, 1, 2), dtype=torch.float32)


def results(backbone, ids=IDS):
    """Embeddings and logits, images first."""
    mask = PADDING[:, : ids.shape[1]]
    pairs = {"images": IMAGES, "token_ids": ids, "padding_mask": mask}
    outputs = backbone(pairs)
    both = outputs["image_embeddings"], outputs["text_embeddings"]
    logits = backbone.logit_scale.logits(*both)
    return [keras.ops.convert_to_numpy(x) for x in (*both, logits)]


def check(backbone, images, texts, logits, ids=IDS, **tolerance):
    expected = [np.asarray(x) for x in (images, texts, logits)]
    expected[:2] = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in expected[:2]]
    for actual, wanted in zip(results(backbone, ids), expected):
        np.testing.assert_allclose(actual, wanted, **{**TOLERANCE, **tolerance})


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers(tmp_path, kind):
    reference = getattr(clip_models, f"transformers_{kind}")()
    normalized = pixels(MEAN, STD) if kind == "clip" else pixels()
    arguments = {"input_ids": torch.tensor(IDS), "pixel_values": normalized}
    if kind == "clip":
        arguments["attention_mask"] = torch.tensor(PADDING)
    with torch.no_grad():
        expected = reference(**arguments)
    reference.save_pretrained(tmp_path)
    backbone, report = models.convert(str(tmp_path))
    assert type(backbone).__name__ == "CLIPBackbone"
    assert report.ignored == {}
    check(
        backbone,
        expected.image_embeds,
        expected.text_embeds,
        expected.logits_per_image,
    )
    assert "logit_bias" in backbone.logit_scale.parameters() or kind == "clip"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ({}, {"quick_gelu": True}),
        (
            {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
            {"custom_text": True, "init_logit_bias": -10.0},
        ),
    ],
)
def test_open_clip(tmp_path, text, model):
    config = clip_models.open_clip_config(text, **model)
    reference = clip_models.open_clip_model(config)
    normalized, ids = pixels(MEAN, STD), torch.tensor(IDS)
    with torch.no_grad():
        images, texts = reference.encode_image(normalized), reference.encode_text(ids)
        logits = reference.get_logits(normalized, ids)[0]
    folder = clip_models.save_open_clip(reference, config, tmp_path)
    check(models.from_preset(folder), images, texts, logits)


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_kerashub(kind):
    hub = hub_randomized(hub_clip() if kind == "clip" else hub_siglip())
    ids = IDS[:, :5] % 10
    outputs = hub({"images": IMAGES, "token_ids": ids})
    images, texts = hub.get_vision_embeddings(IMAGES), hub.get_text_embeddings(ids)
    expected = [
        keras.ops.convert_to_numpy(x) for x in (images, texts, outputs["vision_logits"])
    ]
    # The last norm of KerasHub's CLIP has another epsilon.
    check(models.from_preset(hub), *expected, ids, rtol=1e-4, atol=1e-4)


@pytest.mark.backend_free
def test_a_missing_tower_is_reported(tmp_path):
    reference = clip_models.transformers_clip()
    state = {name: x.numpy() for name, x in reference.state_dict().items()}
    config = reference.config.to_dict()
    for kept, missing in (("vision_model.", "text"), ("text_model.", "image")):
        part = {k: v for k, v in state.items() if k.startswith(kept)}
        folder = write_folder(tmp_path / missing, part, config)
        model, report = models.convert(folder)
        assert type(model).__name__ in ("ViTBackbone", "TextBackbone")
        assert any(f"the {missing} tower is missing" in x for x in report.notes)


@pytest.mark.backend_free
def test_overrides_and_another_image_size(tmp_path):
    folder = str(tmp_path)
    clip_models.transformers_clip().save_pretrained(folder)
    backbone, report = models.convert(folder, image_shape=(16, 16, 3), seed=3)
    assert backbone.image_shape == (16, 16, 3)
    (positions,) = [
        x for x in report.weights if x.weight == "image/position_embedding/embedding"
    ]
    assert "resized from (2, 2) to (4, 4)" in positions.how
    other = models.convert(folder, text={"dropout_rate": 0.1})[0]
    assert other.get_config()["text"]["dropout_rate"] == 0.1


@pytest.mark.backend_free
@pytest.mark.parametrize("case", ["map_pooling_no_bias", "moe_both_towers"])
def test_vmoes_two_towers(tmp_path, case):
    arrays, config = golden.load(f"08_two_tower/{case}")
    prefix = write_vmoe(
        tmp_path / "checkpoint",
        {
            name.removeprefix("params/"): value
            for name, value in arrays.items()
            if name.startswith("params/")
        },
    )
    # Weights do not tell with which capacity a group of images or texts competes.
    overrides = {}
    for tower in ("image", "text"):
        if moe := config["model"][tower]["encoder"].get("moe"):
            overrides[tower] = {
                "num_selected_experts": moe["router"]["num_selected_experts"],
                "capacity_factor": 1.0,
                "eval_capacity_factor": 1.0,
                "examples_per_group": 4 if tower == "text" else moe["group_size"] // 16,
                "priority": "max_gate",
            }
    backbone, report = models.convert(prefix, **overrides)
    texts = arrays["inputs/texts"]
    outputs = backbone(
        {
            "images": arrays["inputs/images"],
            "token_ids": texts,
            "padding_mask": np.ones_like(texts),
        }
    )
    both = outputs["image_embeddings"], outputs["text_embeddings"]
    logits = backbone.logit_scale.logits(*both)
    for actual, name in zip((*both, logits), ("zimg", "ztxt", "logits")):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(actual),
            arrays[f"outputs/{name}"],
            rtol=1e-4,
            atol=1e-4,
        )
    assert report.scheme == "V-MoE (Google)"
    text, report = models.convert(prefix, tower="text", **overrides.get("text", {}))
    assert isinstance(text, models.TextBackbone)
    assert "of the image tower" in report.ignored.values()


@pytest.mark.backend_free
@pytest.mark.parametrize("case", ["vit_token", "vit_qk_norm_map"])
def test_an_image_tower_of_timm_in_open_clip(tmp_path, case):
    arrays, info = golden.load(f"12_timm/{case}")
    tensors = {
        name.replace("state_dict/", "visual.trunk."): value
        for name, value in arrays.items()
        if name.startswith("state_dict/") and "/head." not in name
    }
    size, is_map = tensors["visual.trunk.pos_embed"].shape[2], case.endswith("map")
    text = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
    model = {"init_logit_bias": -10.0, "custom_text": True}
    config = clip_models.open_clip_config(text, **model)
    config["embed_dim"] = size if is_map else 5
    other = clip_models.open_clip_model(config).state_dict()
    tensors.update({k: v.numpy() for k, v in other.items() if "visual." not in k})
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
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3}
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    folder = write_folder(tmp_path, tensors, open_clip_config=content)
    # No pair has norms of queries and keys in the blocks alone.
    heads = {"num_heads": info["kwargs"]["num_heads"]}
    overrides = {"tower": "image", **heads} if is_map else {"image": heads}
    model, report = models.convert(folder, **overrides)
    if is_map:
        received = model.predict(arrays["inputs/images"], verbose=0)
    else:
        assert report.ignored == {}
        received = model.encoder("image").predict(arrays["inputs/images"], verbose=0)
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.backend_free
def test_the_maximum_of_vmoes_texts(tmp_path):
    arrays, _ = golden.load("08_two_tower/moe_both_towers")
    weights = {
        name.removeprefix("params/"): value
        for name, value in arrays.items()
        if name.startswith("params/txt/") or name == "params/img/embedding/kernel"
    }
    prefix = write_vmoe(tmp_path / "checkpoint", weights)
    model, report = models.convert(prefix, tower="text", pooling="max")
    assert model.get_config()["pooling"] == "max"
    assert not any("pooling" in note for note in report.notes)
    ids = arrays["inputs/texts"]
    # Every token counts, as in vmoe's `gmp`, whatever the mask says.
    outputs = model({"token_ids": ids, "padding_mask": ids > 9})
    tokens = keras.ops.convert_to_numpy(outputs["tokens"])
    head = arrays["params/txt/head/kernel"], arrays["params/txt/head/bias"]
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(outputs["pooled"]),
        tokens.max(axis=1) @ head[0] + head[1],
        rtol=1e-5,
        atol=1e-5,
    )
