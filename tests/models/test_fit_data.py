"""`fit`, `evaluate` and `predict` take what Keras takes, on every backend."""

import grain
import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
import torch

from keras_moe.models import ViTBackbone, ViTImageClassifier
from tests.small_models import SMALL, images

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES = images(6, *SMALL["image_shape"])
LABELS = np.array([0, 1, 2, 0, 1, 2], "int32")
BATCHES = [
    (IMAGES[start : start + 2], LABELS[start : start + 2]) for start in (0, 2, 4)
]


def classifier(**kwargs):
    backbone = ViTBackbone.from_config(
        {**{**SMALL, "moe_layers": None, "num_layers": 1}, "seed": 0}
    )
    model = ViTImageClassifier(backbone, 3, **kwargs)
    model.compile(keras.optimizers.SGD(0.0))
    return model


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    made = classifier()
    made.get_layer("predictions").kernel.assign(images(16, 3))
    return made


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return BATCHES[index]


class Examples:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


def data_loader():
    arrays = (torch.from_numpy(values) for values in (IMAGES, LABELS))
    dataset = torch.utils.data.TensorDataset(*arrays)
    return torch.utils.data.DataLoader(dataset, batch_size=2)


def grain_loader():
    return grain.DataLoader(
        data_source=Examples(),
        sampler=grain.samplers.SequentialSampler(6, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(2)],
    )


SOURCES = {
    "PyDataset": Sequence,
    "DataLoader": data_loader,
    "generator": lambda: (batch for batch in BATCHES),
    "tf.data": lambda: tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2),
    "grain.MapDataset": lambda: grain.MapDataset.source(Examples()).batch(2),
    "grain.IterDataset": lambda: (
        grain.MapDataset.source(Examples()).to_iter_dataset().batch(2)
    ),
    "grain.DataLoader": grain_loader,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_data(model, name):
    expected = model.evaluate(IMAGES, LABELS, batch_size=2, verbose=0)
    outputs = model.predict(IMAGES, batch_size=2, verbose=0)
    source = SOURCES[name]
    # A generator is used up; Keras knows no length of it or of Grain's datasets.
    history = model.fit(source(), validation_data=source(), verbose=0).history
    assert history["loss"] == pytest.approx([expected[0]], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected[0]], rel=1e-5)
    assert model.evaluate(source(), verbose=0) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(
        model.predict(source(), verbose=0), outputs, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["PyDataset", "DataLoader", "tf.data"])
def test_several_epochs(model, name):
    history = model.fit(SOURCES[name](), epochs=2, verbose=0).history
    assert len(history["loss"]) == 2


def test_several_epochs_of_grain(model):
    # Keras cannot tell the length, so the dataset repeats and the call says it.
    dataset = SOURCES["grain.MapDataset"]().repeat()
    history = model.fit(dataset, epochs=2, steps_per_epoch=3, verbose=0).history
    assert len(history["loss"]) == 2


def test_arrays_are_shuffled():
    seen = []

    class Recorded(ViTImageClassifier):
        def compute_loss(self, x=None, y=None, *args, **kwargs):
            seen.append(y)
            return super().compute_loss(x, y, *args, **kwargs)

    backbone = ViTBackbone.from_config({**SMALL, "moe_layers": None, "num_layers": 1})
    model = Recorded(backbone, 3)
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
    repeated = np.repeat(IMAGES, 5, axis=0), np.repeat(LABELS, 5)
    model.fit(*repeated, batch_size=30, verbose=0)
    order = keras.ops.convert_to_numpy(seen[-1]).ravel()
    assert sorted(order) == sorted(repeated[1])
    assert list(order) != list(repeated[1])


def test_a_preprocessor_of_ones_own_is_left_to_its_owner(model):
    calls = []

    def preprocessor(x):
        calls.append(x)
        return x

    mine = classifier()
    object.__setattr__(mine, "_preprocessor", preprocessor)
    mine.fit(Sequence(), verbose=0)
    mine.evaluate(IMAGES, LABELS, verbose=0)
    mine.predict(IMAGES, verbose=0)
    mine.predict_on_batch(IMAGES)
    assert calls == []


def test_a_keras_hub_preprocessor_is_applied(model):
    converter = keras_hub.layers.ImageConverter(
        image_size=SMALL["image_shape"][:2], scale=2.0
    )
    mine = classifier(
        preprocessor=keras_hub.models.ImageClassifierPreprocessor(converter)
    )
    mine.set_weights(model.get_weights())
    np.testing.assert_allclose(
        mine.predict(IMAGES, verbose=0),
        model.predict(2.0 * IMAGES, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )
