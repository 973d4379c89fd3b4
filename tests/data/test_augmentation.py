"""RandAugment, and random crops of images and of their files."""

import io

import keras
import numpy as np
import pytest

from keras_moe.data import RandAugment, RandomResizedCrop, load
from keras_moe.data.augmentation import _rand_augment_layers, call_with_seed
from keras_moe.data.reading import decode_image
from tests.pipelines import in_pipeline

tf = pytest.importorskip("tensorflow")


def photographs(count=4, size=(12, 10), channels=3, low=0, high=256):
    rng = np.random.default_rng(0)
    return rng.integers(low, high, (count, *size, channels)).astype("float32")


def ramps(height, width):
    """The coordinates of each pixel, as an image of two channels."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns], axis=-1).astype("float32")


def test_crops_of_the_whole_image_and_of_batches():
    images = photographs(size=(16, 16))
    crop = RandomResizedCrop(9, 23, scale=(1, 1), ratio=(1, 1))
    np.testing.assert_allclose(
        crop(images, (0, 1)), tf.image.resize(images, (9, 23)), atol=1e-3
    )
    # Images of a batch are cropped differently and repeatably.
    images = np.repeat(images[:1], 3, axis=0)
    crop = RandomResizedCrop(8, 8)
    output = crop(images, (0, 1)).numpy()
    assert not np.array_equal(output[0], output[1])
    np.testing.assert_array_equal(output, crop(images, (0, 1)))
    assert not np.array_equal(output, crop(images, (0, 2)))
    assert crop(images[0], (0, 1)).shape == (8, 8, 3)


@pytest.mark.parametrize("size", [(40, 40), (60, 30)])
def test_crops_have_the_area_the_shape_and_the_pixels_they_should(size):
    crop = RandomResizedCrop(200, 200, scale=(0.2, 0.6), ratio=(0.5, 2.0))
    images = np.repeat(ramps(*size)[None], 200, axis=0)
    top, left, height, width = np.concatenate(
        tf.map_fn(
            lambda seed: crop._draw(tf.constant(size), seed),
            tf.random.experimental.stateless_split((0, 1), len(images)),
            fn_output_signature=(tf.int32, tf.int32),
        ),
        axis=-1,
    ).T
    # Rounding to whole pixels moves the bounds a little.
    share = height * width / (size[0] * size[1])
    assert share.min() > 0.18
    assert share.max() < 0.64
    assert share.std() > 0.05
    assert (width / height).min() > 0.45
    assert (width / height).max() < 2.2
    assert min(top.min(), left.min()) == 0
    # TensorFlow leaves a pixel at the end.
    assert size[0] - 1 <= (top + height).max() <= size[0]
    assert size[1] - 1 <= (left + width).max() <= size[1]

    output = crop(images, (0, 1)).numpy()
    centre = top + height / 2 - 0.5, left + width / 2 - 0.5
    inner = output[:, 50:150, 50:150].mean((1, 2))
    np.testing.assert_allclose(inner, np.stack(centre, -1), atol=0.02)
    # From the middle of one output pixel to that of another.
    steps = output[:, 150, 150] - output[:, 50, 50]
    np.testing.assert_allclose(steps, np.stack([height, width], -1) / 2, atol=0.02)


def test_a_shape_that_does_not_fit_leaves_the_whole():
    # Nothing of the whole area of a tall image is wide.
    crop = RandomResizedCrop(30, 10, scale=(1, 1), ratio=(1, 2))
    images = ramps(30, 10)
    np.testing.assert_allclose(crop(images, (0, 1)), images, atol=1e-4)


LAYERS = [
    *("shear x", "shear y", "translate x", "translate y", "rotate", "brightness"),
    *("contrast", "colour", "sharpness", "posterise", "solarise", "autocontrast"),
    "equalise",
]


def transformed(name, magnitude, images):
    layer = _rand_augment_layers(magnitude)[LAYERS.index(name)]
    return in_pipeline(lambda image, seed: call_with_seed(layer, image, seed), images)


@pytest.mark.parametrize("name", LAYERS)
def test_transformations_keep_the_range_of_pixels(name):
    images = np.concatenate(
        [photographs(), np.zeros((1, 12, 10, 3)), np.full((1, 12, 10, 3), 255.0)]
    ).astype("float32")
    output = transformed(name, 1.0, images)
    assert output.shape == images.shape
    assert output.min() >= -1e-3
    assert output.max() <= 255 + 1e-3
    if name != "equalise":  # noise has an equal histogram already
        assert not np.array_equal(output[:4], images[:4])


@pytest.mark.parametrize("name", LAYERS[:-2])
def test_no_magnitude_is_no_change(name):
    images = photographs()
    np.testing.assert_allclose(transformed(name, 0.0, images), images, atol=0.01)


def test_contrast_falls_and_rises():
    images = photographs(30, low=100, high=156)
    ratio = transformed("contrast", 0.5, images).std((1, 2, 3)) / images.std((1, 2, 3))
    # 1 - 0.9 / 2 to 1 + 0.9 / 2
    assert 0.54 < ratio.min() < 0.7
    assert 1.3 < ratio.max() < 1.46


# Each of these goes wrong if the layer takes the pixels to be in another range.
def test_range_of_posterise_and_solarise():
    output = transformed("posterise", 1.0, photographs())
    np.testing.assert_array_equal(output, photographs() // 16 * 16)
    images = photographs(40)
    output = transformed("solarise", 1.0, images)
    inverted = output == 255 - images
    assert ((output == images) | inverted).all()
    share = inverted.mean((1, 2, 3))
    assert share.min() < 0.2
    assert share.max() > 0.8
    # Weaker: only bright pixels.
    weak = transformed("solarise", 0.25, images)
    np.testing.assert_array_equal(weak[images < 190], images[images < 190])
    assert (weak != images).any()


def test_ranges_and_signs_of_brightness_and_translation():
    images = np.full((60, 12, 10, 3), 128.0, "float32")
    change = (transformed("brightness", 0.25, images) - images).mean((1, 2, 3))
    # Up to 0.9 / 4 of 255.
    assert 40 < np.abs(change).max() < 58
    assert change.min() < -30
    assert change.max() > 30
    dots = np.zeros((40, 21, 21, 1), "float32")
    dots[:, 8:13, 8:13] = 255
    for axis, name in ((1, "translate x"), (0, "translate y")):
        moved = transformed(name, 0.5, dots)
        # Grey comes from outside; the dot is what is brighter.
        at = [np.argwhere(image[..., 0] > 129).mean(0)[axis] for image in moved]
        assert min(at) < 9
        assert max(at) > 11


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_draws_for_each_image(channels):
    augment = RandAugment(num_ops=2)
    images = np.repeat(photographs(1, channels=channels), 40, axis=0)
    output = in_pipeline(augment, images)
    assert output.shape == images.shape
    different = {image.tobytes() for image in output.round(3)}
    assert len(different) > 25
    np.testing.assert_array_equal(output, in_pipeline(augment, images))
    assert not np.array_equal(output, in_pipeline(augment, images, seed=1))
    # And for each image of a batch.
    (output,) = in_pipeline(RandAugment(num_ops=1), images[None, :20])
    assert output.shape == images[:20].shape
    assert len({image.tobytes() for image in output}) > 10


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


def test_jpeg_files_in_the_colours_of_printing():
    """Files of cyan, magenta, yellow and black are cropped, and decoded, as RGB."""
    from PIL import Image

    file, pixels = io.BytesIO(), photograph(0, 40, 50).numpy()
    Image.fromarray(pixels).convert("CMYK").save(file, "JPEG", quality=95)
    crop = RandomResizedCrop(16, 20, scale=(0.99, 1.0))
    actual = crop.decode(file.getvalue(), decode_image, 3, [1, 2])
    whole = decode_image(file.getvalue())
    np.testing.assert_array_equal(actual, crop(whole, [1, 2]))
    # The picture is still the same one, but for what JPEG loses.
    assert np.abs(tf.cast(whole, "float32") - pixels).mean() < 20


def test_images_do_not_depend_on_the_number_of_threads(tmp_path, monkeypatch):
    for number in range(90):
        path = tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = photograph(number, 12, 15)
        path.write_bytes(tf.io.encode_jpeg(pixels).numpy())
    steps = [RandomResizedCrop(8, 8), "flip", "cutmix"]
    batches = []
    for parallel in (1, 3, tf.data.AUTOTUNE):
        monkeypatch.setattr(tf.data, "AUTOTUNE", parallel)
        dataset = load(
            f"folder:{tmp_path}", "train", (8, 8, 3), 16, steps, one_hot=True
        )
        batches.append(list(dataset.as_numpy_iterator()))
    for others in batches[1:]:
        assert len(others) == len(batches[0]) == 6
        for batch, other in zip(batches[0], others):
            keras.tree.map_structure(np.testing.assert_array_equal, batch, other)
