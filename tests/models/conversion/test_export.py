"""Exported weights are those that were converted, and other libraries load them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from keras_moe import models
from tests import pair_models, published
from tests.compare import assert_same
from tests.published import IDS, MEAN, STD, pixels
from tests.refusals import refuses
from tests.small_models import small_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")


def half_precision_patches(model):
    """Gives the patches' kernel values of half precision, as OpenAI's have."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("patch_embedding.weight", "conv1.weight")):
                weight.copy_(weight.half().float())
    return model


def check_equal(source, target):
    """Compares all tensors of two files bit for bit."""
    before, after = load_file(source), load_file(target)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_pairs_of_transformers(tmp_path, kind):
    reference = getattr(published, f"transformers_{kind}")()
    half_precision_patches(reference).save_pretrained(tmp_path / "source")
    model, conversion = models.convert(str(tmp_path / "source"))
    assert isinstance(model, models.ContrastiveModel)
    assert conversion.ignored == {}
    models.export_weights(model, "transformers", tmp_path / "exported")
    file = "model.safetensors"
    check_equal(tmp_path / "source" / file, tmp_path / "exported" / file)
    loaded = published.read_back(type(reference), tmp_path / "exported")
    content = json.loads((tmp_path / "exported/preprocessor_config.json").read_text())
    mean, std = np.array(content["image_mean"]), np.array(content["image_std"])
    assert mean.tolist() == (MEAN.tolist() if kind == "clip" else [0.5] * 3)
    published.check_transformers_pair(model.backbone, loaded.eval(), pixels(mean, std))


@pytest.mark.parametrize(("name", "cls"), [
    ("clip", "CLIPTextModelWithProjection"),
    ("clip", "CLIPVisionModelWithProjection"),
    ("siglip", "SiglipTextModel"),
    ("siglip", "SiglipVisionModel"),
])  # fmt: skip
def test_towers_of_transformers(tmp_path, name, cls):
    reference = getattr(published, f"transformers_{name}")(cls)
    half_precision_patches(reference).save_pretrained(tmp_path / "source")
    model = models.from_preset(str(tmp_path / "source"))
    models.export_weights(model, "transformers", tmp_path / "exported")
    loaded = published.read_back(getattr(transformers, cls), tmp_path / "exported")
    state = loaded.state_dict()
    for key, value in reference.state_dict().items():
        np.testing.assert_array_equal(state[key].numpy(), value.numpy(), err_msg=key)
    content = json.loads((tmp_path / "exported/config.json").read_text())
    assert content["architectures"] == [cls]


@pytest.mark.parametrize(("text", "model"), [
    ({}, {"quick_gelu": True}),
    (
        {
            "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
            "mlp_ratio": 2.5,
        },
        {"init_logit_bias": -10.0},
    ),
    ({"pool_type": "eos", "eos_id": 9, "ls_init_value": 0.1}, {}),
])  # fmt: skip
def test_pairs_of_open_clip(tmp_path, text, model):
    config = published.open_clip_config(text, **model)
    reference = half_precision_patches(published.open_clip_model(config))
    source = published.save_open_clip(reference, config, tmp_path / "source")
    backbone = models.from_preset(source)
    models.export_weights(backbone, "open_clip", tmp_path / "exported")
    file = "open_clip_model.safetensors"
    check_equal(f"{source}/{file}", tmp_path / "exported" / file)
    content = json.loads((tmp_path / "exported/open_clip_config.json").read_text())
    assert content["preprocess_cfg"]["std"] == STD.tolist()
    loaded = published.open_clip_model(content["model_cfg"])
    tensors = load_file(tmp_path / "exported" / file)
    loaded.load_state_dict({k: torch.tensor(v) for k, v in tensors.items()})
    normalized, ids = pixels(MEAN, STD), torch.tensor(IDS)
    if "eos_id" in text:
        ids = torch.where(ids == 19, 9, ids)
    with torch.no_grad():
        for encode, argument in (("encode_image", normalized), ("encode_text", ids)):
            both = (getattr(x, encode)(argument) for x in (loaded, reference))
            assert_same(*both)


TEXT = {**pair_models.TEXT, "num_layers": 1}
OF_CLIP = {"activation": "quick_gelu", "layer_norm_epsilon": 1e-5}
IMAGE = {**pair_models.IMAGE, "num_layers": 1, "embedding_norm": True, **OF_CLIP}


@pytest.mark.parametrize(("arguments", "word"), [
    ({"moe": {"moe_layers": [0], "num_experts": 2}}, "moe="),
    ({"pooling": "average"}, "pooling='end_of_text'"),
    ({"end_of_text_id": 2}, "end_of_text_id=2"),
    ({"causal": False}, "pooling='last'"),
])  # fmt: skip
def test_texts_that_transformers_has_not(tmp_path, arguments, word):
    backbone = models.TextBackbone(**{**TEXT, **arguments})
    refuses(word, models.export_weights, backbone, "transformers", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("image", "arguments", "word"), [
    ({"moe": {"moe_layers": [0], "num_experts": 2}}, {}, "moe="),
    ({"embedding_norm": False}, {}, "embedding_norm=True"),
    ({}, {"image_pooling": "map"}, "image_pooling='class_token'"),
    ({"activation": "gelu"}, {}, "quick_gelu"),
])  # fmt: skip
def test_pairs_that_open_clip_has_not(tmp_path, image, arguments, word):
    arguments = {"projection_dim": 4, **arguments}
    backbone = models.CLIPBackbone(image={**IMAGE, **image}, text=TEXT, **arguments)
    refuses(word, models.export_weights, backbone, "open_clip", tmp_path)


def test_other_models_and_folders_are_refused(tmp_path):
    text = models.TextBackbone(**TEXT)
    refuses("library='keras'", models.export_weights, text, "keras", tmp_path / "x")
    refuses("the text tower", models.export_weights, text, "open_clip", tmp_path / "x")
    refuses("received: int", models.export_weights, 3, "transformers", tmp_path / "x")
    (tmp_path / "notes.txt").write_text("mine")
    refuses("older export", models.export_weights, text, "transformers", tmp_path)


def test_a_failed_export_leaves_the_older_one(tmp_path, monkeypatch):
    text = models.TextBackbone(**TEXT)
    folder = tmp_path / "x"
    models.export_weights(text, "transformers", folder)
    (folder / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("keras_moe.models.export.write_json", fail)
        with pytest.raises(OSError, match="No space"):
            models.export_weights(text, "transformers", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    models.export_weights(text, "transformers", folder)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_patch_bias_becomes_part_of_the_positions(tmp_path):
    backbone = models.CLIPBackbone(image=IMAGE, text=TEXT, projection_dim=4)
    generator = np.random.default_rng(0)
    for weight in backbone.weights:
        if weight.path == "image/patch_embedding/bias":
            weight.assign(generator.normal(size=weight.shape))
    models.export_weights(backbone, "transformers", tmp_path / "x")
    loaded = transformers.CLIPModel.from_pretrained(tmp_path / "x").eval()
    published.check_transformers_pair(backbone, loaded, pixels())


def test_the_tokenizer_goes_with_a_clip(tmp_path):
    tokenizer = small_tokenizer(max_length=12)
    text = {**TEXT, **OF_CLIP, "vocabulary_size": 530, "max_length": 12}
    image = {**IMAGE, "image_shape": (8, 8, 3)}
    backbone = models.CLIPBackbone(image=image, text=text, projection_dim=4)
    model = models.ContrastiveModel(backbone, tokenizer)
    captions = ["A photo of two CATS!", "the cat's hat"]
    for library in ("transformers", "open_clip"):
        models.export_weights(model, library, tmp_path / library)
        # The tokenizer is the folder's, with the same ids.
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / library)
        rows = read(captions, padding="max_length")
        expected = tokenizer(captions)
        assert rows["attention_mask"] == expected["padding_mask"].astype(int).tolist()
        ids = np.where(rows["attention_mask"], rows["input_ids"], tokenizer.padding_id)
        assert ids.tolist() == expected["token_ids"].tolist()
        back = models.from_preset(str(tmp_path / library), task="contrastive")
        ids = back.preprocessor(captions)["token_ids"]
        assert ids.tolist() == expected["token_ids"].tolist()
    config = json.loads((tmp_path / "transformers/config.json").read_text())
    assert config["text_config"]["bos_token_id"] == tokenizer.start_id
    loaded = transformers.CLIPModel.from_pretrained(tmp_path / "transformers")
    with torch.no_grad():
        inputs = read(captions, padding="max_length", return_tensors="pt")
        features = loaded.eval().get_text_features(**inputs)
    features = getattr(features, "pooler_output", features).numpy()
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode_text(captions), features, atol=1e-5)


def test_a_contrastive_model_keeps_the_preparation_of_its_images(tmp_path):
    preprocessor = {"resample": 2, "size": {"shortest_edge": 10}, "crop_size": 8}
    preprocessor.update(image_mean=MEAN.tolist(), image_std=STD.tolist())
    published.transformers_clip().save_pretrained(tmp_path / "source")
    path = "preprocessor_config.json"
    (tmp_path / "source" / path).write_text(json.dumps(preprocessor))
    model = models.ContrastiveModel.from_preset(str(tmp_path / "source"))
    assert model.image_preprocessor.center_crop == 0.8
    models.export_weights(model, "transformers", tmp_path / "exported")
    content = json.loads((tmp_path / "exported" / path).read_text())
    assert {name: content[name] for name in preprocessor} == {
        **preprocessor,
        "crop_size": {"height": 8, "width": 8},
    }
