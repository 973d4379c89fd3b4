"""Images and labels at the door of a model, and what it survives."""

import warnings

import keras
import numpy as np
import pytest

from keras_moe.models import (
    MixerBackbone,
    MixerImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
    input_checks,
)
from tests.calls import call
from tests.small_models import ONE_BLOCK, SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES, LABELS = np.zeros((2, 16, 8, 2), "float32"), np.array([0, 1])
WRONG = np.zeros((2, 8, 8, 2), "float32")
NONE = IMAGES[:0]


def vit(task=None, **arguments):
    backbone = ViTBackbone.from_config({**SMALL, **arguments})
    return ViTImageClassifier(backbone, 3, **(task or {}))


def mixer(**arguments):
    sizes = {name: size for name, size in SMALL.items() if name != "num_heads"}
    backbone = MixerBackbone.from_config({"token_mlp_dim": 8, **{**sizes, **arguments}})
    return MixerImageClassifier(backbone, 3)


MODELS = {
    "vit": vit,
    "attention pooling": lambda: vit({"pooling": "map"}),
    "muMoE head": lambda: vit({"head": {"num_experts": 4}}),
    "soft": lambda: vit(router="soft"),
    "MoE++": lambda: vit(zero_experts=1, copy_experts=1, constant_experts=1),
    "mixer": mixer,
    "muMoE mixer": lambda: mixer(router="mumoe", token_mixer="mumoe"),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_images_have_no_outputs(name):
    model = MODELS[name]()
    for training in (False, True):
        assert tuple(call(model, NONE, training=training).shape) == (0, 3)
    for outputs in (model.predict(NONE, verbose=0), model.predict_on_batch(NONE)):
        assert isinstance(outputs, np.ndarray)
        assert (outputs.shape, str(outputs.dtype)) == ((0, 3), "float32")
    assert model.backbone.predict(NONE, verbose=0).shape[0] == 0


@pytest.fixture(scope="module")
def model():
    return vit()


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "train_on_batch", "test_on_batch"]
)
@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (WRONG, LABELS, r"\(batch, 16, 8, 2\); received: shape=\(2, 8, 8, 2\)"),
        (IMAGES[0], LABELS, r"received: shape=\(16, 8, 2\)"),
        (NONE, LABELS[:0], "at least one image"),
        (IMAGES, np.array([0, 3]), "received: 3"),
        (IMAGES, np.array([0, -7]), "received: -7"),
        (IMAGES, np.array([0, 0.5]), "received: 0.5"),
    ],
)
def test_images_and_labels_are_checked(model, method, images, labels, message):
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(images, labels)


def test_validation_data_and_predictions_are_checked(model):
    with pytest.raises(ValueError, match="shape="):
        model.fit(IMAGES, LABELS, validation_data=(WRONG, LABELS), verbose=0)
    with pytest.raises(ValueError, match="received: 3"):
        model.fit(IMAGES, LABELS, validation_data=(IMAGES, LABELS + 2), verbose=0)
    for predicts in (model, model.backbone):
        for method in ("predict", "predict_on_batch"):
            with pytest.raises(ValueError, match="shape="):
                getattr(predicts, method)(WRONG)


def test_labels_of_several_classes_are_in_0_to_1():
    model = vit({"multi_label": True})
    with pytest.raises(ValueError, match="received: 0 to 2"):
        model.evaluate(IMAGES, np.array([[0, 1, 2]] * 2), verbose=0)


def test_a_label_may_be_ignored_and_other_losses_take_what_they_like():
    model = vit()
    sparse = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1)
    model.compile("sgd", sparse)
    model._check_inputs(IMAGES, np.array([0, -1]))
    model.compile("sgd", "mse")
    model._check_inputs(IMAGES, np.full((2, 3), 5.0))


def test_a_model_survives_a_call_that_fails(monkeypatch):
    """The checks left out: what no check sees must not cost the weights either."""
    monkeypatch.setattr(input_checks, "_check_shape", lambda *_: None)
    model = vit(**ONE_BLOCK)
    expected = model.predict(IMAGES, verbose=0)
    for method, labels in (
        ("predict", ()),
        ("evaluate", (LABELS,)),
        ("fit", (LABELS,)),
        ("predict_on_batch", ()),
    ):
        with pytest.raises(Exception, match="shape"):
            getattr(model, method)(WRONG, *labels)
        np.testing.assert_array_equal(model.predict(IMAGES, verbose=0), expected)
    fresh = vit(**ONE_BLOCK)
    with pytest.raises(Exception, match="shape"):
        fresh.predict(WRONG, verbose=0)
    assert fresh.predict(IMAGES, verbose=0).shape == (2, 3)
    assert np.isfinite(fresh.fit(IMAGES, LABELS, verbose=0).history["loss"]).all()


def test_bytes_warn_once(model):
    model = vit()
    images = np.full(IMAGES.shape, 255, "uint8")
    with pytest.warns(UserWarning, match="127.5"):
        model.predict_on_batch(images)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Expected images")
        model.predict_on_batch(images)


def test_tensors_are_checked_as_arrays_are(model):
    with pytest.raises(ValueError, match="received: 3"):
        model.evaluate(IMAGES, keras.ops.convert_to_tensor([0, 3]), verbose=0)
    several = vit({"multi_label": True})
    with pytest.raises(ValueError, match="received: 0 to 2"):
        several._check_inputs(IMAGES, keras.ops.convert_to_tensor([[0, 1, 2]] * 2))
    with pytest.warns(UserWarning, match="127.5"):
        several._check_inputs(keras.ops.full(IMAGES.shape, 255, "uint8"))
    # Symbolic tensors and iterators have no values to check.
    model._check_inputs(IMAGES, keras.KerasTensor((None,), "int32"))
    model._check_inputs((image, 7) for image in IMAGES)


def test_a_loss_in_a_list_or_dict_is_looked_into():
    one = "sparse_categorical_crossentropy"
    for loss in ([one], {"predictions": one}):
        with pytest.raises(ValueError, match="received: 3"):
            input_checks.check_labels(np.array([0, 3]), 3, loss)
    with pytest.raises(ValueError, match="received: 3"):
        input_checks.check_labels([np.array([0, 3])], 3, [one])
    input_checks.check_labels([np.array([0, 3])] * 2, 3, [one, one])


def test_the_shapes_of_labels_are_checked():
    sparse, several = "sparse_categorical_crossentropy", "binary_crossentropy"
    check = input_checks.check_labels
    for shape in ((2,), (2, 1)):
        check(np.zeros(shape, "int32"), 3, sparse)
    for shape in ((), (2, 3), (2, 1, 1)):
        with pytest.raises(ValueError, match=r"\(batch,\) or \(batch, 1\); received"):
            check(np.zeros(shape, "int32"), 3, sparse)
    check(np.zeros((2, 3)), 3, several)
    check(np.zeros((2,)), 1, several)
    for shape in ((2,), (2, 1), (2, 4)):
        with pytest.raises(ValueError, match=r"\(batch, 3\), one for each image"):
            check(np.zeros(shape), 3, several)


def test_no_images_at_all_have_a_named_error(model):
    for method in (model.predict, model.predict_on_batch, model.backbone.predict):
        with pytest.raises(ValueError, match="received: None"):
            method(None)
