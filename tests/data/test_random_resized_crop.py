"""Crops of image files, decoded in part, against crops of decoded images."""

import numpy as np
import pytest

from keras_moe.data import RandomResizedCrop, load, write_tfrecords

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free


def photograph(seed, height=75, width=110, channels=3):
    """Smooth colours and some noise."""
    rng = np.random.default_rng(seed)
    colours = rng.uniform(0, 255, (1, 5, 7, channels)).astype("float32")
    image = tf.image.resize(colours, (height, width), method="bicubic")[0]
    image += rng.normal(0, 10, image.shape)
    return tf.cast(tf.clip_by_value(image, 0, 255), "uint8")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_of_a_jpeg_is_decoded_as_the_whole(channels):
    crop = RandomResizedCrop(32, 24)
    encoded = tf.io.encode_jpeg(photograph(0, channels=channels), quality=90)

    def decode(encoded):
        return tf.io.decode_image(encoded, channels=channels, expand_animations=False)

    for seed in range(60):
        expected = crop(decode(encoded), [seed, 1])
        actual = crop.decode(encoded, decode, channels, [seed, 1])
        np.testing.assert_array_equal(actual, expected)


def test_pipelines_crop_alike(tmp_path):
    images = [photograph(seed, 60 + seed, 90 - seed) for seed in range(12)]
    encoders = (tf.io.encode_jpeg, tf.io.encode_png)
    encoded = [encoders[i % 2](image).numpy() for i, image in enumerate(images)]
    write_tfrecords(tmp_path, "train", zip(encoded, [0] * 12), classes=2)

    class Whole(RandomResizedCrop):
        """Has a method of its own, so that images are decoded for it."""

        def __call__(self, images, seed):
            return super().__call__(images, seed)

    actual, expected = (
        np.concatenate(
            [
                images
                for images, _ in load(
                    f"tfrecord:{tmp_path}", "train", (16, 20, 3), augment=[crop, "flip"]
                ).as_numpy_iterator()
            ]
        )
        for crop in (RandomResizedCrop(16, 20), Whole(16, 20))
    )
    np.testing.assert_array_equal(actual, expected)
