"""A KerasHub model's settings are carried over with its weights, or reported."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from tests.models.conversion.test_conversion import hub_clip, hub_siglip, hub_vit

pytestmark = pytest.mark.backend_free


def test_dropout_rates_and_dtypes_are_carried_over():
    hub = hub_vit(dropout_rate=0.1, attention_dropout=0.2, dtype="mixed_bfloat16")
    task = keras_hub.models.ViTImageClassifier(hub, 3, dropout=0.3)
    model, report = models.convert(task)
    config = model.backbone.get_config()
    assert config["dropout_rate"] == 0.1
    assert config["attention_dropout"] == 0.2
    assert model.dropout == 0.3
    assert model.backbone.dtype_policy.name == "mixed_bfloat16"
    assert report.arguments["dtype"] == "mixed_bfloat16"
    again = models.from_preset(task, dtype="float32", dropout_rate=0.0)
    assert again.backbone.dtype_policy.name == "float32"
    assert again.backbone.get_config()["dropout_rate"] == 0.0


def test_a_preprocessor_that_stays_behind_is_reported():
    converter = keras_hub.layers.ViTImageConverter(image_size=(8, 12), scale=1 / 255)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    task = keras_hub.models.ViTImageClassifier(hub_vit(), 3, preprocessor=preprocessor)
    assert any("preprocessor" in note for note in models.convert(task)[1].notes)
    task = keras_hub.models.ViTImageClassifier(hub_vit(), 3)
    assert not models.convert(task)[1].notes


@pytest.mark.parametrize(
    ("activation", "mine"),
    [("linear", None), (keras.activations.softmax, "softmax"), ("sigmoid", "sigmoid")],
)
def test_activations_of_outputs(activation, mine):
    hub = keras_hub.models.ViTImageClassifier(hub_vit(), 3, activation=activation)
    model = models.from_preset(hub)
    assert model.output_activation == mine
    images = np.zeros((1, 8, 12, 3), "float32")
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(model(images)),
        keras.ops.convert_to_numpy(hub(images)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_activations_that_ours_has_not():
    hub = keras_hub.models.ViTImageClassifier(hub_vit(), 3, activation="relu")
    with pytest.raises(ValueError, match=r"'relu' of KerasHub's ViTImageClassifier"):
        models.convert(hub)
    for make in (hub_siglip, hub_clip):
        hub = make()
        hub.vision_encoder.intermediate_activation = "of_no_library"
        with pytest.raises(ValueError, match=r"'of_no_library' in KerasHub's encoder"):
            models.convert(hub)
