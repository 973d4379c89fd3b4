"""From images of any size to what a model takes, on every backend alike."""

import json

import keras
import numpy as np
import pytest
from PIL import Image

from keras_moe.models import ImagePreprocessor
from tests.compare import assert_close, assert_same
from tests.refusals import refuses

GENERATOR = np.random.default_rng(0)
PHOTO = GENERATOR.integers(0, 256, (37, 61, 3), dtype="uint8")


def test_white_and_black_are_the_ends_of_the_range():
    preprocessor = ImagePreprocessor((8, 4, 3))
    black = np.zeros((5, 5, 3), "uint8")
    assert_same(preprocessor(black), np.full((8, 4, 3), -1.0))
    assert_close(preprocessor(black + 255), 1.0, 1e-6)
    normalized = ImagePreprocessor((8, 4, 3), mean=[0.2, 0.3, 0.4], std=[0.5, 1, 2])
    expected = np.array([0.8 / 0.5, 0.7, 0.6 / 2])
    actual = normalized(black + 255)
    assert actual.dtype == "float32"
    assert_close(actual, np.broadcast_to(expected, (8, 4, 3)), 1e-6)


@pytest.mark.parametrize(
    ("interpolation", "resample"), [("bilinear", 2), ("bicubic", 3)]
)
@pytest.mark.parametrize("size", [(9, 12), (50, 80)])
def test_resizing_is_pillows(interpolation, resample, size):
    preprocessor = ImagePreprocessor(
        (*size, 3), mean=0, std=1, interpolation=interpolation, antialias=True
    )
    expected = Image.fromarray(PHOTO).resize(size[::-1], resample)
    # Pillow rounds after the columns and after the rows.
    difference = np.abs(255 * preprocessor(PHOTO) - np.asarray(expected, "float32"))
    assert difference.max() < 1.6


def test_the_middle_is_that_of_timm_and_torchvision():
    preprocessor = ImagePreprocessor(
        (16, 16, 3), 0, 1, "bicubic", center_crop=0.8, antialias=True
    )
    # The shorter side becomes 16 / 0.8 = 20, the longer one int(20 * 61 / 37) = 32.
    resized = np.asarray(Image.fromarray(PHOTO).resize((32, 20), 3), "float32")
    expected = resized[2:18, 8:24]
    assert np.abs(255 * preprocessor(PHOTO) - expected).max() < 1.6
    # Nothing of a square is cut off at 1.
    whole = ImagePreprocessor((16, 16, 3), center_crop=1)
    squashed = ImagePreprocessor((16, 16, 3))
    assert_same(whole(PHOTO[:, :37]), squashed(PHOTO[:, :37]))


def test_images_are_those_of_the_pipelines():
    # `data.load` resizes bilinearly, too, without antialiasing.
    image = PHOTO.astype("float32") / 255
    expected = keras.ops.image.resize(
        image, (12, 20), interpolation="bilinear", antialias=False
    )
    actual = ImagePreprocessor((12, 20, 3))(PHOTO)
    expected = 2 * keras.ops.convert_to_numpy(expected) - 1
    assert_close(actual, expected, atol=1e-5)


def test_forms_of_images():
    preprocessor = ImagePreprocessor((8, 8, 3))
    one = preprocessor(PHOTO)
    assert one.shape == (8, 8, 3)
    batch = np.stack([PHOTO, PHOTO])
    for images in (
        batch,
        [PHOTO, PHOTO],
        (PHOTO, Image.fromarray(PHOTO)),
        keras.ops.convert_to_tensor(batch),
        batch.astype("int64"),
    ):
        assert_same(preprocessor(images), np.stack([one, one]))
    others = preprocessor([PHOTO, PHOTO[:20], PHOTO[:, :7]])
    assert others.shape == (3, 8, 8, 3)
    for nothing in ([], batch[:0]):
        assert preprocessor(nothing).shape == (0, 8, 8, 3)


def test_files(tmp_path):
    preprocessor, path = ImagePreprocessor((8, 8, 3)), tmp_path / "photo.png"
    Image.fromarray(PHOTO).save(path)
    assert_same(preprocessor(path), preprocessor(PHOTO))
    assert_same(preprocessor([str(path), PHOTO]), preprocessor([PHOTO, PHOTO]))
    path.write_bytes(path.read_bytes()[:200])
    refuses(rf"can be decoded; received: .*{path.name} \(", preprocessor, path)
    Image.fromarray(PHOTO).save(path, "TIFF")
    refuses(rf"{path.name} \(UnidentifiedImageError", preprocessor, path)
    with pytest.raises(FileNotFoundError):
        preprocessor(tmp_path / "none.png")


def test_floats():
    preprocessor = ImagePreprocessor((8, 8, 3))
    expected = preprocessor(PHOTO)
    pixels = PHOTO.astype("float32")
    assert_close(preprocessor(pixels / 255), expected, atol=1e-6)
    assert_close(preprocessor(pixels, max_value=255), expected)
    refuses(r"in \[0, 1\], or max_value.*maximum=255", preprocessor, pixels)
    refuses("minimum=-1", preprocessor, pixels / 127.5 - 1)
    refuses("nan", preprocessor, np.full((3, 3, 3), np.nan))
    with pytest.raises(ValueError, match=r"in \[0, 255\].*maximum=65535"):
        preprocessor(np.full((3, 3, 3), 65535, "uint16"))
    gray = keras.ops.ones((5, 5, 3), "bfloat16") * 0.5
    assert_close(preprocessor(gray), 0.0, atol=1e-6)
    mask = PHOTO[..., 0] > 99
    assert_same(preprocessor(mask), preprocessor(255 * mask.astype("uint8")))


def test_grey_and_colour():
    grey = PHOTO[..., 0]
    colour = ImagePreprocessor((37, 61, 3))
    assert_same(colour(grey), colour(np.stack([grey] * 3, axis=-1)))
    assert_same(colour(grey[..., None]), colour(grey))
    to_grey = ImagePreprocessor((37, 61, 1), 0, 1)
    assert to_grey(grey).shape == (37, 61, 1)
    expected = np.asarray(Image.fromarray(PHOTO).convert("L"), "float32")
    assert np.abs(255 * to_grey(PHOTO)[..., 0] - expected).max() < 1
    with_alpha = np.concatenate([PHOTO, PHOTO[..., :1]], axis=-1)
    refuses(r"channels in \(1, 3\).*61, 4", colour, with_alpha)
    assert ImagePreprocessor((8, 8, 4))(with_alpha).shape == (8, 8, 4)
    assert_same(colour(Image.fromarray(with_alpha)), colour(PHOTO))
    # A palette's numbers are no pixels.
    palette = Image.fromarray(PHOTO).convert("P")
    assert_same(colour(palette), colour(palette.convert("RGB")))
    refuses("mode='F'", colour, Image.fromarray(grey.astype("float32")))


def test_arguments_round_trip_as_json():
    preprocessor = ImagePreprocessor(
        (8, 4, 3), [0.1, 0.2, 0.3], 0.7, "bicubic", antialias=True, center_crop=0.9,
        class_names=["a", "b"],
    )  # fmt: skip
    stored = keras.saving.serialize_keras_object(preprocessor)
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(stored)))
    assert again == preprocessor
