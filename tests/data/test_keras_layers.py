"""Layers that are faster than Keras's, against Keras's own."""

import keras
import numpy as np
import pytest

from keras_moe.data import _keras_layers as fast
from keras_moe.data.augmentation import PLAIN, call_with_seed
from tests.pipelines import in_pipeline

tf = pytest.importorskip("tensorflow")


COLOUR = {**PLAIN, "value_range": (0, 255)}

PAIRS = {
    "contrast": (
        fast.Contrast(factor=(0.9, 0.9), **COLOUR),
        keras.layers.RandomContrast(factor=(0.9, 0.9), **COLOUR),
    ),
    "solarization": (
        fast.ScaledSolarization(1.0, addition_factor=0.2, **COLOUR),
        keras.layers.Solarization(threshold_factor=1.0, addition_factor=0.2, **COLOUR),
    ),
    "auto contrast": (fast.AutoContrast(**COLOUR), keras.layers.AutoContrast(**COLOUR)),
    "equalization": (fast.Equalization(**COLOUR), keras.layers.Equalization(**COLOUR)),
}


def images(channels):
    """Numbers, whole numbers, one colour, two, and a channel of one level."""
    rng = np.random.default_rng(0)
    drawn = rng.uniform(30, 200, (5, 12, 9, channels)).astype("float32")
    drawn[1] = np.floor(drawn[1])
    drawn[2] = 7.0
    drawn[3] = 255.0 * (drawn[3] > 100)
    drawn[4, ..., 0] = 0.0
    return drawn


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", PAIRS)
def test_images_are_those_of_keras(name, channels):
    def mapped(layer, batch):
        return in_pipeline(lambda x, seed: call_with_seed(layer, x, seed), batch, 3)

    # One by one, and as a batch, of which Keras makes one histogram.
    for batch in (images(channels), images(channels)[None]):
        actual, expected = (mapped(layer, batch) for layer in PAIRS[name])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5)
        assert (actual != batch).any()


@pytest.mark.parametrize("shape", [(16, 9, 12, 3), (7, 5, 4, 1)])
def test_cut_mix_is_that_of_keras(shape):
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (4, *shape)).astype("float32")
    labels = rng.uniform(size=(4, shape[0], 5)).astype("float32")

    def mixed(layer):
        def apply(number, images, labels):
            seed = tf.stack([tf.cast(number, "int32"), 3])
            return call_with_seed(layer, {"images": images, "labels": labels}, seed)

        batches = tf.data.Dataset.from_tensor_slices((images, labels)).enumerate()
        batches = batches.map(lambda number, batch: apply(number, *batch))
        assert batches.element_spec["images"].shape == shape
        return list(batches.as_numpy_iterator())

    actual, expected = (
        mixed(kind(0.7, seed=1, **PLAIN)) for kind in (fast.CutMix, keras.layers.CutMix)
    )
    for mixes, others, own in zip(actual, expected, images):
        np.testing.assert_array_equal(mixes["images"], others["images"])
        np.testing.assert_array_equal(mixes["labels"], others["labels"])
        assert (mixes["images"] != own).any()
        assert (mixes["images"] == own).any()


@pytest.mark.parametrize("shape", [(40, 5, 6, 3), (40, 3, 4, 5, 1), (9, 2, 3, 1, 4)])
def test_flips_are_those_of_keras(shape):
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    layer = keras.layers.RandomFlip("horizontal", **PLAIN)
    actual = in_pipeline(fast.RandomFlip(), images, 7)
    expected = in_pipeline(lambda x, seed: call_with_seed(layer, x, seed), images, 7)
    np.testing.assert_array_equal(actual, expected)
