"""CutMix against Keras's own layer."""

import keras
import numpy as np
import pytest

from keras_moe.data.cut_mix import CutMix
from keras_moe.data.seeded_layers import PLAIN, call_with_seed

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize("shape", [(16, 9, 12, 3), (7, 5, 4, 1)])
def test_images_and_labels_are_those_of_keras(shape):
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
        mixed(kind(0.7, seed=1, **PLAIN)) for kind in (CutMix, keras.layers.CutMix)
    )
    for mixes, others, own in zip(actual, expected, images):
        np.testing.assert_array_equal(mixes["images"], others["images"])
        np.testing.assert_array_equal(mixes["labels"], others["labels"])
        assert (mixes["images"] != own).any()
        assert (mixes["images"] == own).any()


def test_a_lone_image_and_inference_change_nothing():
    image = np.ones((4, 5, 3), "float32")
    layer = CutMix(seed=1, **PLAIN)
    np.testing.assert_array_equal(layer(image, training=True), image)
    np.testing.assert_array_equal(layer(image[None], training=False), image[None])
