"""`compile`, `fit` and `predict`: losses, data of every kind."""

import functools
import gc

import keras
import keras_hub
import numpy as np
import pytest
from keras import losses, ops

from keras_moe.models import CausalLM, DecoderBackbone, ViTBackbone, ViTImageClassifier
from tests.compare import assert_close
from tests.models.kinds_of_data import SOURCES, Batches
from tests.pair_models import MOE, ONE, TEXT
from tests.small_models import ONE_BLOCK, SMALL, images, small_classifier

BACKEND = keras.backend.backend()
IMAGES = images(6, *SMALL["image_shape"])
SPARSE = np.array([0, 1, 2, 0, 1, 2], "int32")
ONE_HOT = np.eye(3, dtype="float32")[SPARSE]


def classifier(num_classes=3, cls=ViTImageClassifier, **kwargs):
    config = {**SMALL, "moe_layers": None, "num_layers": 1, "seed": 0}
    model = cls(ViTBackbone.from_config(config), num_classes, **kwargs)
    model.compile(keras.optimizers.SGD(0.0))
    return model


def language_model():
    # Gated experts of two kinds, and logits in chunks.
    experts = {"zero_experts": 1, "gated_experts": True, "expert_activation": "silu"}
    config = {**TEXT, **MOE, **ONE, **experts, "max_length": 136}
    ids = np.ones((2, 136), "int32")
    model = CausalLM(DecoderBackbone.from_config(config))
    return model, {"token_ids": ids, "padding_mask": ids}, None


def images_model(**options):
    model = small_classifier(**options, **ONE_BLOCK)
    return model, images(2, 16, 8, 3), SPARSE[:2]


# Models with all functions that have a gradient of their own, and a batch.
MODELS = {
    "recomputed": lambda: images_model(rematerialize=True),
    "language": language_model,
    "multilinear": lambda: images_model(router="mumoe", rank=3),
}


@pytest.fixture(scope="module")
def models(op_by_op):
    """A model of each kind of labels and outputs, which the tests compile anew."""
    keras.utils.set_random_seed(0)
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
    ("logits", "auto", SPARSE), ("logits", "sparse_categorical_crossentropy", SPARSE),
    ("logits", "categorical_crossentropy", ONE_HOT),
    ("logits", losses.CategoricalFocalCrossentropy(from_logits=True), ONE_HOT),
    ("logits", ["categorical_crossentropy"], ONE_HOT),
    ("logits", own_sparse, SPARSE), ("softmax", "categorical_crossentropy", ONE_HOT),
    ("multi_label", "auto", ONE_HOT), ("multi_label", "binary_crossentropy", ONE_HOT),
    ("multi_label", Own(), ONE_HOT),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "loss", "labels"), CASES)
def test_metrics_follow_the_loss(models, kind, loss, labels):
    model = models[kind]
    model.compile("sgd", loss)
    model.optimizer.learning_rate.assign(0.0)
    history = model.fit(IMAGES, labels, verbose=0).history
    outputs = model.predict(IMAGES, verbose=0)
    if kind == "multi_label":
        name, measure = "auc", keras.metrics.AUC(curve="PR", from_logits=True)
        measure.update_state(ONE_HOT, outputs)
        expected = float(measure.result())
    else:
        name, expected = "accuracy", np.mean(outputs.argmax(-1) == SPARSE)
    assert set(history) == {"loss", name}
    assert history[name] == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize("kind", ["logits", "softmax"])
@pytest.mark.parametrize(("name", "labels"), [
    ("categorical_crossentropy", ONE_HOT),
    ("SparseCategoricalCrossentropy", SPARSE),
])  # fmt: skip
def test_a_crossentropy_by_name_reads_the_outputs(models, kind, name, labels):
    model = models[kind]
    model.compile("sgd", name, metrics=None)
    outputs = model.predict(IMAGES, verbose=0)
    if kind == "logits":
        outputs = ops.convert_to_numpy(ops.softmax(outputs))
    expected = -np.mean(np.log(outputs[np.arange(6), SPARSE]))
    actual = model.evaluate(IMAGES, labels, verbose=0, return_dict=True)
    assert actual == {"loss": pytest.approx(expected, rel=1e-4)}


def test_what_does_not_fit_the_outputs_is_told(models):
    with pytest.warns(UserWarning, match="outputs are logits"):
        models["logits"].compile("sgd", losses.CategoricalCrossentropy())
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        models["softmax"].compile("sgd", losses.CategoricalCrossentropy(True))
    model = models["multi_label"]
    model.compile()
    with pytest.raises(ValueError, match=r"labels in \[0, 1\] .* received: -1"):
        model.fit(SOURCES["generator"](IMAGES, 2 * ONE_HOT - 1), verbose=0)


def test_one_output_counts_decisions(op_by_op):
    model = classifier(num_classes=1)
    model.output_dense.kernel.assign(images(16, 1))
    model.compile("sgd", "binary_crossentropy")
    labels = np.array([[0], [1], [0], [1], [1], [0]], "float32")
    actual = model.evaluate(IMAGES, labels, verbose=0, return_dict=True)
    decisions = model.predict(IMAGES, verbose=0) > 0
    assert actual["accuracy"] == pytest.approx(np.mean(decisions == labels))


@pytest.mark.every_backend
@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_data(models, name):
    """Labels are checked in every batch, after which the model stays usable."""
    model = models["logits"]
    model.compile(keras.optimizers.SGD(0.0))
    expected = model.evaluate(IMAGES, SPARSE, batch_size=2, verbose=0)
    outputs = model.predict(IMAGES, batch_size=2, verbose=0)
    source = functools.partial(SOURCES[name], IMAGES, SPARSE)
    # A generator is used up; Keras knows no length of it or of Grain's datasets.
    history = model.fit(source(), validation_data=source(), verbose=0).history
    assert history["loss"] == pytest.approx([expected[0]], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected[0]], rel=1e-5)
    assert model.evaluate(source(), verbose=0) == pytest.approx(expected, rel=1e-5)
    assert_close(model.predict(source(), verbose=0), outputs, 1e-5, 1e-6)
    try:
        SPARSE[5] = 3
        for method in (model.fit, model.evaluate):
            # TensorFlow checks classes itself.
            with pytest.raises(Exception, match=r"received: 3|label value of 3"):
                method(source(), verbose=0)
    finally:
        SPARSE[5] = 2
    assert model.evaluate(IMAGES, SPARSE, batch_size=2, verbose=0) == expected


def test_arrays_are_shuffled(op_by_op):
    seen = []

    class Recorded(ViTImageClassifier):
        def compute_loss(self, x=None, y=None, *args, **kwargs):
            seen.append(y)
            return super().compute_loss(x, y, *args, **kwargs)

    model = classifier(cls=Recorded)
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
    repeated = np.repeat(IMAGES, 5, axis=0), np.repeat(SPARSE, 5)
    model.fit(*repeated, batch_size=30, verbose=0)
    order = ops.convert_to_numpy(seen[-1]).ravel()
    assert sorted(order) == sorted(repeated[1])
    assert list(order) != list(repeated[1])


def test_a_keras_hub_preprocessor_is_applied_and_no_other(models):
    shape = SMALL["image_shape"][:2]
    converter = keras_hub.layers.ImageConverter(image_size=shape, scale=2.0)
    preprocessor = keras_hub.models.ImageClassifierPreprocessor(converter)
    mine, plain = classifier(preprocessor=preprocessor), models["logits"]
    mine.set_weights(plain.get_weights())
    expected = plain.predict(2.0 * IMAGES, verbose=0)
    assert_close(mine.predict(IMAGES, verbose=0), expected, 1e-4, 1e-5)
    calls = []
    object.__setattr__(mine, "_preprocessor", calls.append)
    mine.fit(Batches(IMAGES, SPARSE), verbose=0)
    mine.evaluate(IMAGES, SPARSE, verbose=0)
    mine.predict(IMAGES, verbose=0)
    mine.predict_on_batch(IMAGES)
    assert calls == []


class Weights(keras.callbacks.Callback):
    """Reads weights in the middle of an epoch, as an evaluation does."""

    def __init__(self):
        super().__init__()
        self.kinds, self.values = set(), []

    def on_train_batch_end(self, batch, logs=None):
        # JAX's trainer keeps the state of each step with the model, untracked.
        if keras.backend.backend() == "jax":
            self.kinds |= {type(x) for x in self.model._jax_state.values()}
            self.model.jax_state_sync()
        kernel = self.model.get_layer("predictions").kernel
        self.values.append(ops.convert_to_numpy(kernel))


@pytest.mark.every_backend
def test_training_is_that_of_a_plain_model():
    mine = classifier()
    weights, histories, values = mine.get_weights(), [], []
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    for model in (mine, keras.Model(mine.input, mine.output)):
        model.set_weights(weights)
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        callback = Weights()
        history = model.fit(IMAGES, SPARSE, 2, callbacks=[callback], **options)
        histories.append(history.history["loss"])
        values.append(callback.values)
        if model is mine and keras.backend.backend() == "jax":
            assert callback.kinds == {list}
    # TensorFlow compiles two programs, which may sum in another order.
    tolerance = 1e-6 if keras.backend.backend() == "tensorflow" else 0
    assert_close(*histories, rtol=tolerance, atol=tolerance)
    assert_close(*values, rtol=tolerance, atol=tolerance)
    assert len(np.unique(np.array(values[0])[:, 0, 0])) == 6


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's graphs")
@pytest.mark.parametrize("name", MODELS)
def test_no_traced_step_outlives_its_model(name, traced):
    """TensorFlow registers gradients for ever, and with them their graphs."""
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.python.framework.ops import gradient_registry

    def alive():
        gc.collect()
        return [x for x in gc.get_objects() if type(x) is FuncGraph]

    registered, before = set(gradient_registry.list()), len(alive())
    model, x, y = MODELS[name]()
    model.compile("adam", jit_compile=False)
    model.train_on_batch(x, y)
    assert len(alive()) > before
    del model
    keras.backend.clear_session()
    assert set(gradient_registry.list()) == registered
    assert len(alive()) <= before


@pytest.mark.every_backend
def test_a_failing_first_step_leaves_the_model_usable(monkeypatch):
    model = classifier()

    def failing_step(self, *args):
        raise RuntimeError("broken step")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "train_step", failing_step)
        with pytest.raises(Exception, match="broken step"):
            model.fit(IMAGES, SPARSE)
    model.make_train_function(force=True)
    model.fit(IMAGES, SPARSE, verbose=0)
    # The function itself is back in its place.
    assert getattr(model.train_function, "__name__", "") != "first_step"


@pytest.mark.every_backend
def test_predictions_are_the_same_whichever_weights_are_frozen():
    model = small_classifier(**ONE_BLOCK)
    attention = model.backbone.get_layer("block_0").token_mixer
    inputs = images(2, 16, 8, 3)
    expected = ops.convert_to_numpy(model(inputs, training=False))
    # States of the same shapes in another order.
    for frozen in (attention.query_dense, attention.key_dense):
        frozen.trainable = False
        for predict in (model.predict_on_batch, model.predict):
            assert_close(predict(inputs), expected, atol=1e-5)
        frozen.trainable = True


@pytest.mark.every_backend
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_model_that_is_not_compiled_says_so(method):
    backbone = ViTBackbone.from_config(SMALL)
    model = ViTImageClassifier(backbone, num_classes=3, compile=False)
    x = images(2, *SMALL["image_shape"])
    with pytest.raises(ValueError, match="You must call `compile"):
        getattr(model, method)(x, np.zeros(2, "int32"))
