"""Text towers of others give the same embeddings in our models."""

import keras
import numpy as np
import pytest

from keras_moe import models
from tests.models.conversion import clip_models
from tests.models.conversion.clip_models import IDS, PADDING
from tests.models.conversion.test_conversion import hub_clip, hub_siglip
from tests.models.conversion.test_conversion import randomized as hub_randomized
from tests.models.conversion.writers import write_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KEPT = PADDING.astype(bool)


def outputs(backbone):
    received = backbone({"token_ids": IDS, "padding_mask": PADDING})
    return {k: keras.ops.convert_to_numpy(x) for k, x in received.items()}


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


def pooled_of(model, *args, **kwargs):
    with torch.no_grad():
        result = model(*args, **kwargs)
    return result.numpy() if torch.is_tensor(result) else result


@pytest.mark.parametrize(
    ("cls", "end", "activation"),
    [
        ("CLIPTextModelWithProjection", 19, "quick_gelu"),
        ("CLIPTextModel", 2, "gelu"),
    ],
)
def test_clip_of_transformers(tmp_path, cls, end, activation):
    reference = clip_models.transformers_clip(cls, end, activation)
    expected = pooled_of(
        reference, input_ids=torch.tensor(IDS), attention_mask=torch.tensor(PADDING)
    )
    backbone = models.from_preset(saved(reference, tmp_path))
    received = outputs(backbone)
    np.testing.assert_allclose(
        received["tokens"][KEPT], expected.last_hidden_state.numpy()[KEPT], **TOLERANCE
    )
    pooled = expected.get("text_embeds", expected.get("pooler_output"))
    np.testing.assert_allclose(received["pooled"], pooled.numpy(), **TOLERANCE)
    config = backbone.get_config()
    assert config["end_of_text_id"] == (None if end == 2 else end)
    assert config["activation"] == activation


def test_siglip_of_transformers(tmp_path):
    reference = clip_models.transformers_siglip("SiglipTextModel")
    expected = pooled_of(reference, input_ids=torch.tensor(IDS))
    backbone, report = models.convert(saved(reference, tmp_path))
    received = outputs(backbone)
    for name, theirs in (("tokens", "last_hidden_state"), ("pooled", "pooler_output")):
        np.testing.assert_allclose(
            received[name], expected[theirs].numpy(), **TOLERANCE
        )
    assert report.scheme == "SigLIP (transformers)"
    assert not report.ignored


@pytest.mark.backend_free
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_classes_take_their_towers(tmp_path, kind):
    make = getattr(clip_models, f"transformers_{kind}")
    folder = saved(make(), tmp_path)
    reference = make()
    with torch.no_grad():
        expected = reference.get_text_features(input_ids=torch.tensor(IDS))
    expected = getattr(expected, "pooler_output", expected).numpy()
    text = models.TextBackbone.from_preset(folder)
    np.testing.assert_allclose(outputs(text)["pooled"], expected, **TOLERANCE)
    assert isinstance(models.ViTBackbone.from_preset(folder), models.ViTBackbone)
    same, report = models.convert(folder, tower="text")
    np.testing.assert_array_equal(outputs(same)["pooled"], outputs(text)["pooled"])
    reasons = {"of the image tower", "of the logits of pairs"}
    assert set(report.ignored.values()) == reasons
    assert isinstance(models.from_preset(folder, num_classes=3), models.ImageClassifier)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ({}, {"quick_gelu": True}),
        (
            {
                "no_causal_mask": True,
                "proj_bias": True,
                "pool_type": "last",
                "norm_kwargs": {"eps": 1e-6},
                "act_kwargs": {"approximate": "tanh"},
                "mlp_ratio": 3.0,
            },
            {"custom_text": True, "init_logit_bias": -10.0},
        ),
        ({"pool_type": "eos", "eos_id": 9, "ls_init_value": 0.1}, {}),
        ({"pool_type": "first", "proj_type": "none"}, {"custom_text": True}),
    ],
)
def test_open_clip(tmp_path, text, model):
    config = clip_models.open_clip_config(text, **model)
    reference = clip_models.open_clip_model(config)
    ids = np.where(IDS == 19, 9, IDS) if "eos_id" in text else IDS
    with torch.no_grad():
        expected = reference.encode_text(torch.tensor(ids)).numpy()
    folder = clip_models.save_open_clip(reference, config, tmp_path)
    backbone = models.TextBackbone.from_preset(folder)
    received = backbone({"token_ids": ids, "padding_mask": PADDING})["pooled"]
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(received), expected, **TOLERANCE
    )


@pytest.mark.backend_free
def test_kerashubs_clip():
    clip = hub_randomized(hub_clip())
    ids = IDS[:, :5] % 10
    expected = keras.ops.convert_to_numpy(clip.get_text_embeddings(ids))
    texts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    backbone, report = models.convert(clip, tower="text")
    received = keras.ops.convert_to_numpy(backbone(texts)["pooled"])
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-4)
    assert any("epsilon" in note for note in report.notes)
    tokens = keras.ops.convert_to_numpy(clip.text_encoder({"token_ids": ids}))
    received = models.from_preset(clip.text_encoder)(texts)["tokens"]
    received = keras.ops.convert_to_numpy(received)
    np.testing.assert_allclose(received, tokens, rtol=1e-4, atol=1e-4)


@pytest.mark.backend_free
def test_kerashubs_siglip():
    siglip = hub_randomized(hub_siglip())
    ids = IDS[:, :5] % 10
    expected = keras.ops.convert_to_numpy(siglip.text_encoder({"token_ids": ids}))
    for source in (siglip, siglip.text_encoder):
        backbone = models.TextBackbone.from_preset(source)
        received = backbone({"token_ids": ids, "padding_mask": np.ones_like(ids)})
        received = keras.ops.convert_to_numpy(received["pooled"])
        np.testing.assert_allclose(received, expected, **TOLERANCE)


def open_clip_folder(path, text=None, **model):
    """A folder with a text tower of one block and few tensors."""
    return write_folder(
        path,
        {
            "token_embedding.weight": np.zeros((20, 8), "float32"),
            "positional_embedding": np.zeros((6, 8), "float32"),
            "transformer.resblocks.0.mlp.c_fc.weight": np.zeros((16, 8), "float32"),
        },
        open_clip_config={
            "model_cfg": clip_models.open_clip_config({"layers": 1, **(text or {})})
            | model
        },
    )


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text_arch", "modern"),
        ("hf_model_name", "roberta-base"),
        ("embed_cls", True),
        ("pool_type", "none"),
        ("qk_norm", True),
        ("block_type", "custom"),
        ("norm_kwargs", {"bias": False}),
        ("act_kwargs", {"approximate": "erf"}),
    ],
)
def test_what_open_clip_has_and_ours_has_not(tmp_path, name, value):
    folder = open_clip_folder(tmp_path, {name: value})
    with pytest.raises(
        ValueError, match=f"text_cfg.{name}={value!r}".translate(ESCAPE)
    ):
        models.from_preset(folder)


ESCAPE = str.maketrans({"{": r"\{", "}": r"\}"})


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ({"context_length": 7}, "context_length=7"),
        ({"vocab_size": 21}, "vocab_size=21"),
        ({"heads": "two"}, "heads"),
    ],
)
def test_sizes_of_open_clip(tmp_path, text, word):
    with pytest.raises(ValueError, match=word):
        models.from_preset(open_clip_folder(tmp_path, text))


@pytest.mark.backend_free
def test_a_tower_that_is_not_there(tmp_path):
    folder = saved(clip_models.transformers_clip("CLIPTextModel"), tmp_path)
    with pytest.raises(ValueError, match="image tower"):
        models.ViTBackbone.from_preset(folder)
    with pytest.raises(ValueError, match="image tower"):
        models.ViTBackbone.from_preset(hub_clip().text_encoder)
    with pytest.raises(ValueError, match="text tower"):
        models.TextBackbone.from_preset(hub_clip().vision_encoder)


@pytest.mark.backend_free
def test_an_end_of_text_out_of_the_vocabulary(tmp_path):
    model = clip_models.transformers_clip("CLIPTextModel", 49407)
    folder = saved(model, tmp_path)
    with pytest.raises(ValueError, match="eos_token_id=49407"):
        models.from_preset(folder)
    backbone = models.from_preset(folder, end_of_text_id=None)
    assert backbone.get_config()["end_of_text_id"] is None
