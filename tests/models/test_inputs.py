"""Images and labels at the door of a model, and what it survives."""

import warnings

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.base import _input_checks
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.models.kinds_of_data import SOURCES
from tests.refusals import refuses
from tests.small_models import ONE_BLOCK, classifier, mixer

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES, LABELS = np.zeros((2, 16, 8, 2), "float32"), np.array([0, 1])
WRONG = np.zeros((2, 8, 8, 2), "float32")
NONE = IMAGES[:0]


MUMOE = {"router": "mumoe", "token_mixer": "mumoe"}
MODELS = {
    "vit": classifier,
    "attention pooling": lambda: classifier({"pooling": "map"}),
    "muMoE head": lambda: classifier({"head": {"num_experts": 4}}),
    "soft": lambda: classifier(router="soft"),
    "MoE++": lambda: classifier(zero_experts=1, copy_experts=1, constant_experts=1),
    "mixer": lambda: models.MixerImageClassifier(mixer(), 3),
    "muMoE mixer": lambda: models.MixerImageClassifier(mixer(**MUMOE), 3),
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
    return classifier()


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "train_on_batch", "test_on_batch"]
)
@pytest.mark.parametrize(("images", "labels", "message"), [
    (WRONG, LABELS, r"\(batch, 16, 8, 2\); received: shape=\(2, 8, 8, 2\)"),
    (IMAGES[0], LABELS, r"received: shape=\(16, 8, 2\)"),
    (NONE, LABELS[:0], "at least one image"),
    (IMAGES, np.array([0, 3]), "received: 3"),
    (IMAGES, np.array([0, -7]), "received: -7"),
    (IMAGES, np.array([0, 0.5]), "received: 0.5"),
])  # fmt: skip
def test_images_and_labels_are_checked(model, method, images, labels, message):
    refuses(message, getattr(model, method), images, labels)


def test_validation_data_and_predictions_are_checked(model):
    with pytest.raises(ValueError, match="shape="):
        model.fit(IMAGES, LABELS, validation_data=(WRONG, LABELS), verbose=0)
    with pytest.raises(ValueError, match="received: 3"):
        model.fit(IMAGES, LABELS, validation_data=(IMAGES, LABELS + 2), verbose=0)
    for predicts in (model, model.backbone):
        for method in (predicts.predict, predicts.predict_on_batch):
            refuses("shape=", method, WRONG)
            refuses("received: None", method, None)


def test_a_model_survives_a_call_that_fails(monkeypatch):
    """The checks left out: what no check sees must not cost the weights either."""
    monkeypatch.setattr(models.base._input_checks, "_check_shape", lambda *_: None)
    model = classifier(**ONE_BLOCK)
    expected = model.predict(IMAGES, verbose=0)
    for method, labels in (
        ("predict", ()),
        ("evaluate", (LABELS,)),
        ("fit", (LABELS,)),
        ("predict_on_batch", ()),
    ):
        with pytest.raises(Exception, match="shape"):
            getattr(model, method)(WRONG, *labels)
        assert_same(model.predict(IMAGES, verbose=0), expected)
    assert np.isfinite(model.fit(IMAGES, LABELS, verbose=0).history["loss"]).all()


@pytest.mark.every_backend
def test_a_short_last_batch_has_a_slot_for_each_expert():
    router = {"capacity_rounding": "round", "capacity_factor": 0.1}
    model = classifier(**ONE_BLOCK, router={"name": "softmax_token_choice", **router})
    images, labels = IMAGES[[0, 1, 0, 1, 0]], LABELS[[0, 1, 0, 1, 0]]
    history = model.fit(images, labels, batch_size=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@pytest.mark.every_backend
@pytest.mark.parametrize("source", ["arrays", *list(SOURCES)[:4]])
def test_pixels_from_0_to_255_of_any_source_warn_once(source):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 8, 2))
    raw, standardised = pixels.astype("float32"), (pixels - 128) / 74
    labels, rows = np.tile(LABELS, 3), {}
    if source == "arrays":
        rows = {"y": labels, "batch_size": 2}
    made = SOURCES.get(source, lambda images, _: images)
    model, losses = classifier(**ONE_BLOCK), []
    model.compile(keras.optimizers.SGD(0.0))
    for images in (standardised.astype("float32"), raw, raw):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(made(images, labels), **rows, verbose=0)
            losses += model.evaluate(made(images, labels), **rows, verbose=0)[:1]
            assert len(model.predict(made(images, labels), verbose=0)) == 6
        found = [x for x in caught if "pixels from" in str(x.message)]
        expected = images is raw and len(losses) == 2
        assert [x.filename for x in found] == [__file__] * expected
    # No batch was lost on the way.
    assert int(model.optimizer.iterations) == 9
    expected = model.test_on_batch(raw, labels)[0]
    assert_close(losses[1:], expected, 1e-5)


@pytest.mark.parametrize(("images", "warns"), [
    (np.full((1, 16, 8, 2), 9, "uint8"), True),
    # A line drawing, and one whose pixels were standardised one by one.
    (255 * (np.arange(16) % 8 == 0).repeat(16).reshape(1, 16, 8, 2), True),
    (200.0 * (np.arange(256) == 0).reshape(1, 16, 8, 2) - 0.1, False),
    # Interpolation overshoots.
    (np.linspace(-9, 263, 256).reshape(1, 16, 8, 2), True),
])  # fmt: skip
def test_scale_of_pixels(images, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _input_checks.warn_of_raw_pixels(classifier(**ONE_BLOCK), images)
    assert len(caught) == warns


SPARSE, SEVERAL = "sparse_categorical_crossentropy", "binary_crossentropy"
IGNORED = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1)


@pytest.mark.parametrize(("labels", "num_classes", "loss", "message"), [
    (np.array([0, 3]), 3, SPARSE, "received: 3"),
    ([np.array([0, 3])] * 2, 3, [SPARSE, SPARSE], None),
    (np.array([0, -1]), 3, IGNORED, None),
    (np.zeros((2, 1), "int32"), 3, SPARSE, None),
    (np.zeros((), "int32"), 3, SPARSE, r"\(batch,\) or \(batch, 1\); received"),
    (np.zeros((2, 3), "int32"), 3, SPARSE, r"\(batch,\) or \(batch, 1\)"),
    (np.array([[0, 1, 2]]), 3, SEVERAL, "received: 0 to 2"),
    (np.zeros((2, 4)), 3, SEVERAL, r"\(batch, 3\), one for each image"),
    (keras.KerasTensor((None,), "int32"), 3, SPARSE, None),
])  # fmt: skip
@pytest.mark.parametrize("as_tensor", [False, True])
def test_labels_are_those_of_the_loss(labels, num_classes, loss, message, as_tensor):
    if as_tensor and isinstance(labels, np.ndarray):
        labels = keras.ops.convert_to_tensor(labels)
    if message is None:
        models.base._input_checks.check_labels(labels, num_classes, loss)
        return
    refuses(message, models.base._input_checks.check_labels, labels, num_classes, loss)
