"""Crops of image files, decoded in part, against crops of decoded images."""

import io

import keras
import numpy as np
import pytest

from keras_moe.data import RandomResizedCrop, load, write_tfrecords
from keras_moe.data.reading import decode_image

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


def test_jpeg_files_in_the_colours_of_printing(tmp_path):
    """Files of cyan, magenta, yellow and black are cropped, and decoded, as RGB."""
    from PIL import Image

    for number in range(4):
        path = tmp_path / "test" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = photograph(number, 40, 50).numpy()
        Image.fromarray(pixels).convert("CMYK").save(path, quality=95)
    crop = RandomResizedCrop(16, 20, scale=(0.99, 1.0))
    encoded = path.read_bytes()
    assert Image.open(io.BytesIO(encoded)).mode == "CMYK"
    actual = crop.decode(encoded, decode_image, 3, [1, 2])
    expected = crop(decode_image(encoded), [1, 2])
    np.testing.assert_array_equal(actual, expected)
    # The pictures are still the same ones, but for what JPEG loses.
    whole = load(f"folder:{tmp_path}", "test", (40, 50, 3), 1)
    for number, (images, _) in zip((0, 2, 1, 3), whole.as_numpy_iterator()):
        pixels = photograph(number, 40, 50).numpy()
        assert np.abs((images[0] + 1) * 127.5 - pixels).mean() < 20


@pytest.mark.parametrize("mixer", [None, "cutmix"])
def test_images_do_not_depend_on_the_number_of_threads(tmp_path, monkeypatch, mixer):
    for number in range(90):
        path = tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = photograph(number, 12, 15)
        path.write_bytes(tf.io.encode_jpeg(pixels).numpy())
    crop = RandomResizedCrop(8, 8)
    steps = [crop, "flip", *([mixer] if mixer else [])]
    batches = []
    for parallel in (1, 3, tf.data.AUTOTUNE):
        monkeypatch.setattr(tf.data, "AUTOTUNE", parallel)
        dataset = load(
            f"folder:{tmp_path}", "train", (8, 8, 3), 16, steps, one_hot=bool(mixer)
        )
        batches.append(list(dataset.as_numpy_iterator()))
    for others in batches[1:]:
        assert len(others) == len(batches[0]) == 6
        for batch, other in zip(batches[0], others):
            keras.tree.map_structure(np.testing.assert_array_equal, batch, other)
