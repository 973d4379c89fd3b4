"""KerasHub's models have the same outputs here, and keep their settings."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from tests.compare import assert_close
from tests.published import (
    IDS,
    hub_classifier,
    hub_clip,
    hub_randomized,
    hub_siglip,
    hub_vit,
    predict,
    random_images,
)

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
WIDE, SQUARE = random_images((8, 12, 3)), random_images((8, 8, 3), 3)
TOKENS = IDS[:, :5] % 10
TEXTS = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}


def check_equal(received, expected):
    received, expected = map(keras.ops.convert_to_numpy, (received, expected))
    assert_close(received, expected, **TOLERANCE)


@pytest.mark.parametrize("kwargs", [
    {},
    {"use_mha_bias": False, "use_mlp_bias": False, "use_patch_bias": False},
    {"use_class_token": False, "layer_norm_epsilon": 1e-3, "name": "mine"},
])  # fmt: skip
def test_features_of_vit(tmp_path, kwargs):
    hub = hub_randomized(hub_vit(**kwargs))
    backbone, report = models.convert(hub)
    assert isinstance(backbone, models.ViTBackbone)
    assert len(hub.weights) == len({n for w in report.weights for n in w.sources})
    check_equal(predict(backbone, WIDE), predict(hub, WIDE))
    if not kwargs:
        hub.save_to_preset(tmp_path / "hub")
        again = models.from_preset(str(tmp_path / "hub"))
        assert isinstance(again, models.ViTBackbone)
        check_equal(predict(again, WIDE), predict(hub, WIDE))


@pytest.mark.parametrize(
    "kwargs", [{}, {"pooling": "gap", "intermediate_dim": 5, "activation": "softmax"}]
)
def test_logits_of_vit(kwargs):
    hub = hub_randomized(hub_classifier(**kwargs))
    check_equal(predict(models.from_preset(hub), WIDE), predict(hub, WIDE))


@pytest.mark.parametrize("kind", ["clip", "clip with ids", "siglip", "siglip of gelu"])
def test_pairs_and_their_towers(kind):
    is_clip = "siglip" not in kind
    hub = hub_siglip("gelu") if "gelu" in kind else hub_siglip()
    hub = hub_randomized(hub_clip() if is_clip else hub)
    if "ids" in kind:
        # Its presets have these; a new model has zeros.
        hub.vision_encoder.embedding.position_ids.assign(np.arange(5)[None])
    backbone = models.from_preset(hub, task="backbone")
    outputs = backbone({"images": SQUARE, **TEXTS})
    both = outputs["image_embeddings"], outputs["text_embeddings"]
    logits = hub({"images": SQUARE, "token_ids": TOKENS})["vision_logits"]
    check_equal(backbone.logit_scale.logits(*both), logits)
    images, texts = hub.get_vision_embeddings(SQUARE), hub.get_text_embeddings(TOKENS)
    for received, theirs in zip(both, (images, texts)):
        theirs = keras.ops.convert_to_numpy(theirs)
        check_equal(received, theirs / np.linalg.norm(theirs, axis=1, keepdims=True))
    image, report = models.convert(hub, tower="image")
    check_equal(predict(image, SQUARE), images)
    if is_clip:
        assert report.notes == ["the text tower and the logits' scale are left out"]
    text, report = models.convert(hub, tower="text")
    check_equal(text(TEXTS)["pooled"], texts)
    assert any("epsilon" in note for note in report.notes) == is_clip
    # CLIP's encoders alone have no projection.
    encoder = models.from_preset(hub.vision_encoder)
    expected = predict(hub.vision_encoder, {"images": SQUARE})
    check_equal(predict(encoder, SQUARE), expected)
    received = models.from_preset(hub.text_encoder)(TEXTS)
    expected = hub.text_encoder({"token_ids": TOKENS})
    check_equal(received["tokens" if is_clip else "pooled"], expected)


def test_dropout_rates_and_dtypes_are_carried_over():
    hub = hub_vit(dropout_rate=0.1, attention_dropout=0.2, dtype="mixed_bfloat16")
    task = keras_hub.models.ViTImageClassifier(
        hub, 3, dropout=0.3, head_dtype="float32"
    )
    model, report = models.convert(task)
    config = model.backbone.get_config()
    assert config["dropout_rate"] == 0.1
    assert config["attention_dropout"] == 0.2
    assert model.dropout == 0.3
    assert model.output_dense.dtype_policy.name == "float32"
    assert model.backbone.dtype_policy.name == "mixed_bfloat16"
    assert report.arguments["dtype"] == "mixed_bfloat16"
    again = models.from_preset(task, dtype="float32", dropout_rate=0.0)
    assert again.backbone.dtype_policy.name == "float32"
    assert again.backbone.get_config()["dropout_rate"] == 0.0


@pytest.mark.parametrize(
    ("activation", "mine"),
    [("linear", None), (keras.activations.softmax, "softmax"), ("sigmoid", "sigmoid")],
)
def test_activations_of_outputs(activation, mine):
    hub = hub_classifier(activation=activation)
    model = models.from_preset(hub)
    assert model.output_activation == mine
    check_equal(model(WIDE), hub(WIDE))


def hub_task(**converter):
    converter = keras_hub.layers.ViTImageConverter(image_size=(8, 12), **converter)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    return hub_classifier(preprocessor=preprocessor)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_preprocessor(per_channel):
    scale, offset = 1 / 127.5, -1.0
    if per_channel:
        scale, offset = [1 / 51, 1 / 102, 1 / 255], [-2.0, -1.0, 0.0]
    task = hub_task(scale=scale, offset=offset, crop_to_aspect_ratio=False)
    model, report = models.convert(task)
    photo = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype="uint8")
    expected = np.asarray(task.preprocessor(photo))
    assert_close(model.preprocessor(photo), expected, atol=1e-5)
    assert any("model.preprocessor" in note for note in report.notes)
    grey = models.convert(task, image_shape=(8, 12, 1))[0].preprocessor
    assert grey.image_shape == (8, 12, 1)


def test_preprocessors_that_are_left_behind():
    model, report = models.convert(hub_task())
    assert model.preprocessor is None
    assert any("preprocessor" in note for note in report.notes)
    model, report = models.convert(hub_classifier())
    assert model.preprocessor is None
    assert not report.notes
    assert models.from_preset(hub_vit(), num_classes=3).preprocessor is None
    assert models.from_preset(hub_task(scale=1 / 255)).preprocessor.center_crop == 1.0
