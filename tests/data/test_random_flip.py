"""Flips against Keras's own layer, and its draws."""

import keras
import numpy as np
import pytest

from keras_moe.data import load
from keras_moe.data.random_flip import RandomFlip
from keras_moe.data.seeded_layers import PLAIN, call_with_seed

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free


def drawn(function, images):
    dataset = tf.data.Dataset.from_tensor_slices(images).enumerate()
    dataset = dataset.map(lambda i, x: function(x, tf.stack([tf.cast(i, "int32"), 7])))
    return np.stack(list(dataset.as_numpy_iterator()))


@pytest.mark.parametrize("shape", [(40, 5, 6, 3), (40, 3, 4, 5, 1), (9, 2, 3, 1, 4)])
def test_flips_are_those_of_keras(shape):
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    layer = keras.layers.RandomFlip("horizontal", **PLAIN)
    actual = drawn(RandomFlip(), images)
    expected = drawn(lambda x, seed: call_with_seed(layer, x, seed), images)
    np.testing.assert_array_equal(actual, expected)


def test_half_of_the_images_are_flipped():
    images = np.tile(np.arange(4.0, dtype="float32")[:, None], (1000, 1, 1, 1))
    is_flipped = drawn(RandomFlip(), images)[:, 0, 0, 0] == 3
    # Four standard deviations.
    assert abs(is_flipped.mean() - 0.5) < 4 * 0.5 / 1000**0.5


def test_files_that_cannot_be_read_are_named_where_they_are_met(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(90):
        folder = tmp_path / "test" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (9, 8, 3), "uint8")
        encoded = tf.io.encode_jpeg(pixels).numpy()
        (folder / f"{number:02}.jpg").write_bytes(encoded)
    options = {"image_shape": (4, 4, 3), "batch_size": 1, "augment": "flip"}
    whole = load(f"folder:{tmp_path}", "test", **options)
    expected = [images for images, _ in whole.as_numpy_iterator()]
    assert len(expected) == len(whole) == 90

    # Image 25 of the second class is number 70 in the order of the folders.
    damaged = tmp_path / "test" / "b" / "51.jpg"
    damaged.write_bytes(damaged.read_bytes()[:90])
    batches = load(f"folder:{tmp_path}", "test", **options).as_numpy_iterator()
    for _, images in zip(range(70), expected):
        np.testing.assert_array_equal(next(batches)[0], images)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"decoded.*b/51\.jpg"):
        next(batches)
