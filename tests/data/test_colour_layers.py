"""Layers of contrast and colour against Keras's own."""

import keras
import numpy as np
import pytest

from keras_moe.data import colour_layers
from keras_moe.data.seeded_layers import PLAIN, call_with_seed

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free

COLOUR = {**PLAIN, "value_range": (0, 255)}

PAIRS = {
    "contrast": (
        colour_layers.Contrast(factor=(0.9, 0.9), **COLOUR),
        keras.layers.RandomContrast(factor=(0.9, 0.9), **COLOUR),
    ),
    "solarization": (
        colour_layers.ScaledSolarization(1.0, addition_factor=0.2, **COLOUR),
        keras.layers.Solarization(threshold_factor=1.0, addition_factor=0.2, **COLOUR),
    ),
    "auto contrast": (
        colour_layers.AutoContrast(**COLOUR),
        keras.layers.AutoContrast(**COLOUR),
    ),
    "equalization": (
        colour_layers.Equalization(**COLOUR),
        keras.layers.Equalization(**COLOUR),
    ),
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
        dataset = tf.data.Dataset.from_tensor_slices(batch).enumerate()
        dataset = dataset.map(
            lambda i, x: call_with_seed(layer, x, tf.stack([tf.cast(i, "int32"), 3]))
        )
        assert dataset.element_spec.shape[-1] == channels
        return np.stack(list(dataset.as_numpy_iterator()))

    # One by one, and as a batch, of which Keras makes one histogram.
    for batch in (images(channels), images(channels)[None]):
        actual, expected = (mapped(layer, batch) for layer in PAIRS[name])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5)
        assert (actual != batch).any()


@pytest.mark.parametrize("name", ["contrast", "solarization", "equalization"])
def test_inference_changes_nothing(name):
    layer, _ = PAIRS[name]
    batch = images(3)
    np.testing.assert_array_equal(layer(batch, training=False), batch)
