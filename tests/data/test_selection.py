import numpy as np
import pytest

from keras_moe.data import ImageHashes, find_duplicates, image_hashes, write_tfrecords
from keras_moe.data.digits import read_pixels

tf = pytest.importorskip("tensorflow")

COUNT = 150


def digits():
    pixels = tf.image.resize(read_pixels("all")[0][: 2 * COUNT], (64, 64), "bicubic")
    return tf.cast(tf.clip_by_value(tf.repeat(pixels, 3, -1), 0, 255), "uint8").numpy()


def jpeg(image, quality):
    return tf.io.encode_jpeg(image, quality=quality).numpy()


def resized(image, size):
    return tf.cast(tf.image.resize(image, size, antialias=True), "uint8").numpy()


CHANGES = {
    "same": lambda image: image,
    "jpeg": lambda image: jpeg(image, 50),
    "smaller": lambda image: resized(image, (40, 40)),
    "squeezed": lambda image: jpeg(resized(image, (48, 52)), 60),
    "paler": lambda image: (image * 0.8 + 30).astype("uint8"),
}


@pytest.fixture(scope="module")
def hashes(tmp_path_factory):
    """Records of 300 digits, and of changed copies of the first 150."""
    folder, images = tmp_path_factory.mktemp("digits"), digits()
    write_tfrecords(folder, "train", ((image, 0) for image in images), 2)
    for name, change in CHANGES.items():
        copies = ((change(image), 0) for image in images[:COUNT])
        write_tfrecords(folder, name, copies, 2)
    return {
        name: image_hashes(f"tfrecord:{folder}", name) for name in ("train", *CHANGES)
    }


@pytest.mark.parametrize("name", CHANGES)
def test_copies_are_found_and_nothing_else(hashes, name):
    actual = find_duplicates(hashes["train"], hashes[name])
    right = np.sum(actual < COUNT)
    assert right / len(actual) == 1.0  # precision
    assert right / COUNT >= 0.98  # recall
    exact = find_duplicates(hashes["train"], hashes[name], max_distance=None)
    assert len(exact) == (COUNT if name == "same" else 0)


def test_distances_are_counted_in_bits(monkeypatch):
    def made(perceptual, has_structure=True):
        perceptual = np.array(perceptual, "uint64")
        numbers = np.random.default_rng(len(perceptual)).integers(2**60, size=99)
        structured = np.full(len(perceptual), has_structure)
        return ImageHashes(numbers[: len(perceptual)], perceptual, structured)

    train = made([0, 1, 3, 2**63, 2**64 - 1, 2**64 - 8])
    reference = made([0, 2**64 - 1])
    expected = {0: [0, 4], 1: [0, 1, 3, 4], 2: [0, 1, 2, 3, 4], 3: [0, 1, 2, 3, 4, 5]}
    # In blocks of several images, and of one.
    for block in (1 << 22, 1):
        monkeypatch.setattr("keras_moe.data.selection._BLOCK", block)
        for distance, indices in expected.items():
            steps = {}
            actual = find_duplicates(train, reference, distance, steps.__setitem__)
            assert actual.tolist() == indices
            assert [*steps.items()][-1] == (6, 6)
    # An image of one colour: nothing but the same pixels is a copy.
    assert len(find_duplicates(train, made([0], has_structure=False))) == 0


def test_images_of_one_colour(tmp_path):
    for split, levels in (("train", [10, 20, 30]), ("test", [20])):
        images = ((np.full((8, 8, 3), level, "uint8"), 0) for level in levels)
        write_tfrecords(tmp_path, split, images, 2)
    source, seen = f"tfrecord:{tmp_path}", []
    train = image_hashes(source, "train", progress=lambda *step: seen.append(step))
    assert find_duplicates(train, image_hashes(source, "test")).tolist() == [1]
    assert seen == [(3, 3, source)]
