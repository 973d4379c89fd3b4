"""`compile` with losses of every kind: the metrics follow, and logits are logits."""

import keras
import numpy as np
import pytest
from keras import losses, ops

from keras_moe.losses import SigmoidCrossentropy
from keras_moe.models import ViTBackbone, ViTImageClassifier
from tests.small_models import SMALL, images

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES = images(6, *SMALL["image_shape"])
SPARSE = np.array([0, 1, 2, 0, 1, 2])
ONE_HOT = np.eye(3, dtype="float32")[SPARSE]


def classifier(num_classes=3, **kwargs):
    backbone = ViTBackbone.from_config(
        {**{**SMALL, "moe_layers": None, "num_layers": 1}, "seed": 0}
    )
    return ViTImageClassifier(backbone, num_classes, **kwargs)


@pytest.fixture(scope="module")
def models():
    """A model of each kind of labels and outputs, which the tests compile anew."""
    classifiers = {
        "logits": classifier(),
        "softmax": classifier(output_activation="softmax"),
        "multi_label": classifier(multi_label=True),
    }
    for model in classifiers.values():
        model.output_dense.kernel.assign(images(16, 3))
    return classifiers


class Own(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


def own_sparse(y_true, y_pred):
    return -ops.take_along_axis(
        ops.log_softmax(y_pred), ops.reshape(ops.cast(y_true, "int32"), (-1, 1)), 1
    )


CASES = [
    ("logits", "auto", SPARSE, "accuracy"),
    ("logits", "sparse_categorical_crossentropy", SPARSE, "accuracy"),
    ("logits", "categorical_crossentropy", ONE_HOT, "accuracy"),
    ("logits", "CategoricalCrossentropy", ONE_HOT, "accuracy"),
    ("logits", losses.categorical_crossentropy, ONE_HOT, "accuracy"),
    (
        "logits",
        losses.CategoricalFocalCrossentropy(from_logits=True),
        ONE_HOT,
        "accuracy",
    ),
    ("logits", SigmoidCrossentropy(from_logits=True), ONE_HOT, "accuracy"),
    ("logits", ["categorical_crossentropy"], ONE_HOT, "accuracy"),
    ("logits", Own(), ONE_HOT, "accuracy"),
    ("logits", own_sparse, SPARSE, "accuracy"),
    ("softmax", "categorical_crossentropy", ONE_HOT, "accuracy"),
    ("multi_label", "auto", ONE_HOT, "auc"),
    ("multi_label", "binary_crossentropy", ONE_HOT, "auc"),
    ("multi_label", losses.BinaryFocalCrossentropy(from_logits=True), ONE_HOT, "auc"),
    ("multi_label", Own(), ONE_HOT, "auc"),
]


@pytest.mark.parametrize(("kind", "loss", "labels", "metric"), CASES)
def test_metrics_follow_the_loss(models, kind, loss, labels, metric):
    model = models[kind]
    model.compile("sgd", loss)
    model.optimizer.learning_rate.assign(0.0)
    history = model.fit(IMAGES, labels, verbose=0).history
    assert set(history) == {"loss", metric}
    outputs = model.predict(IMAGES, verbose=0)
    if metric == "accuracy":
        expected = np.mean(outputs.argmax(-1) == SPARSE)
    else:
        measure = keras.metrics.AUC(curve="PR", from_logits=True)
        measure.update_state(ONE_HOT, outputs)
        expected = float(measure.result())
    assert history[metric] == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize("kind", ["logits", "softmax"])
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("categorical_crossentropy", ONE_HOT),
        ("sparse_categorical_crossentropy", SPARSE),
        ("SparseCategoricalCrossentropy", SPARSE),
    ],
)
def test_a_crossentropy_by_name_reads_the_outputs(models, kind, name, labels):
    model = models[kind]
    model.compile("sgd", name, metrics=None)
    outputs = model.predict(IMAGES, verbose=0)
    if kind == "logits":
        outputs = ops.convert_to_numpy(ops.softmax(outputs))
    expected = -np.mean(np.log(outputs[np.arange(6), SPARSE]))
    actual = model.evaluate(IMAGES, labels, verbose=0)
    assert actual == pytest.approx(expected, rel=1e-4)


def test_a_loss_of_probabilities_on_logits_warns(models):
    with pytest.warns(UserWarning, match="outputs are logits"):
        models["logits"].compile("sgd", losses.CategoricalCrossentropy())
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        models["softmax"].compile("sgd", losses.CategoricalCrossentropy(True))


def test_one_output_counts_decisions(models):
    model = classifier(num_classes=1)
    model.output_dense.kernel.assign(images(16, 1))
    model.compile("sgd", "binary_crossentropy")
    labels = np.array([[0], [1], [0], [1], [1], [0]], "float32")
    actual = model.evaluate(IMAGES, labels, verbose=0, return_dict=True)
    decisions = model.predict(IMAGES, verbose=0) > 0
    assert actual["accuracy"] == pytest.approx(np.mean(decisions == labels))


def test_no_metrics_are_none(models):
    models["logits"].compile("sgd", Own(), metrics=None)
    actual = models["logits"].evaluate(IMAGES, ONE_HOT, verbose=0, return_dict=True)
    assert set(actual) == {"loss"}


def test_settings_of_training_are_copied(models):
    models["logits"].compile("sgd", "categorical_crossentropy")
    again = models["logits"].copy()
    assert isinstance(again.loss, losses.CategoricalCrossentropy)
    assert again.loss.from_logits
