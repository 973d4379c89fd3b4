"""Fashion-MNIST, in files of its true format."""

import gzip

import numpy as np
import pytest

from keras_moe.data import (
    _fashion_mnist,
    class_names,
    credit,
    load,
    num_classes,
    num_examples,
)
from tests.refusals import refuses

RNG = np.random.default_rng(0)
IMAGES = {
    "train": RNG.integers(0, 256, (6, 28, 28), "uint8"),
    "t10k": RNG.integers(0, 256, (4, 28, 28), "uint8"),
}
LABELS = {"train": np.uint8([9, 0, 3, 3, 1, 2]), "t10k": np.uint8([4, 5, 6, 9])}


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write(folder, images=IMAGES, labels=LABELS):
    for prefix in images:
        for name, arrays in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{prefix}-{name}-ubyte.gz"
            path.write_bytes(idx(arrays[prefix]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_fashion_mnist, "DEBIAN", str(tmp_path / "debian"))
    (tmp_path / "debian").mkdir()
    return tmp_path / "debian"


def test_batches_are_the_files(folder, tmp_path):
    write(folder)
    dataset = load("fashion_mnist", "test", (28, 28, 1), batch_size=4, shuffle=False)
    images, labels = next(iter(dataset))
    expected = IMAGES["t10k"][..., None] / 127.5 - 1
    np.testing.assert_allclose(images, expected, atol=1e-6)
    np.testing.assert_array_equal(labels, LABELS["t10k"])
    assert num_classes("fashion_mnist") == 10
    names = class_names("fashion_mnist")
    assert (names[0], names[9]) == ("T-shirt/top", "ankle boot")
    counts = {x: num_examples("fashion_mnist", x) for x in ("train", "test", "all")}
    assert counts == {"train": 6, "test": 4, "all": 10}
    colours, _ = next(iter(load("fashion_mnist", "train", (14, 14, 3), batch_size=6)))
    assert colours.shape == (6, 14, 14, 3)
    # A folder of one's own goes before Debian's.
    own = tmp_path / "own"
    own.mkdir()
    write(own, {x: IMAGES[x][:2] for x in IMAGES}, {x: LABELS[x][:2] for x in LABELS})
    assert num_examples("fashion_mnist", "train", str(own)) == 2


def test_damaged_files_are_named(folder):
    write(folder)
    path = folder / "t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    # Cut off, no gzip file, damaged, and too short for its sizes.
    damaged = whole[:12] + b"\xff\xff" + whole[14:]
    for content in (whole[:-9], b"no gzip", damaged, gzip.compress(b"\0\0\x08\1")):
        path.write_bytes(content)
        refuses(f"IDX file; received: {path}", load, "fashion_mnist", "test")
    for labels, message in (([0, 1, 2], "4 images, 3 labels"), ([9, 10, 0, 0], "10")):
        path.write_bytes(idx(np.asarray(labels, "uint8")))
        refuses(f"below 10 .*{folder}; .*{message}", load, "fashion_mnist", "test")


def test_the_sample_needs_no_files(folder):
    sample = load("fashion_mnist", "sample", (28, 28, 1), batch_size=100, shuffle=False)
    images, labels = next(iter(sample))
    assert images.shape == (100, 28, 28, 1)
    assert np.bincount(labels, minlength=10).min() >= 5
    names = class_names("fashion_mnist")
    first = [names[label] for label in labels[:4]]
    assert first == ["ankle boot", "pullover", "trouser", "trouser"]
    assert credit("fashion_mnist") == "Fashion-MNIST, Zalando SE, MIT"
