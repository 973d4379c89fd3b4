import keras
import numpy as np
import pytest

from keras_moe.data import load_digits
from keras_moe.data.digits import read_pixels


def rows(images):
    return {image.tobytes() for image in images}


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (20, 12, 3)])
def test_shapes_and_range(shape):
    images, labels = load_digits("all", shape)
    assert images.shape == (1797, *shape)
    assert images.dtype == "float32"
    assert labels.dtype == "int32"
    assert images.min() == -1
    assert images.max() <= 1
    np.testing.assert_array_equal(images, np.repeat(images[..., :1], shape[2], -1))
    assert set(labels) == set(range(10))


def test_ink_is_one_and_paper_is_minus_one():
    from sklearn.datasets import load_digits as of_sklearn

    images, labels = load_digits("all", (8, 8, 1))
    np.testing.assert_allclose(images[..., 0], of_sklearn().images / 8 - 1, atol=1e-6)
    np.testing.assert_array_equal(labels, of_sklearn().target)


def test_splits_are_stratified_disjoint_and_complete():
    train, test = load_digits("train", (8, 8, 1)), load_digits("test", (8, 8, 1))
    assert len(train[0]) == 1347
    assert len(test[0]) == 450
    everything = rows(load_digits("all", (8, 8, 1))[0])
    assert not rows(train[0]) & rows(test[0])
    assert rows(train[0]) | rows(test[0]) == everything
    share = np.bincount(test[1]) / np.bincount(load_digits("all")[1])
    np.testing.assert_allclose(share, 0.25, atol=0.01)
    first, again, other = (load_digits("test", seed=seed)[1] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("size", [(8, 8), (32, 32), (5, 13), (3, 40)])
def test_resizing_is_that_of_keras(size):
    pixels, _ = read_pixels("test")
    expected = keras.ops.image.resize(
        pixels[:20], size, "bilinear", antialias=False, data_format="channels_last"
    )
    images, _ = load_digits("test", (*size, 1))
    np.testing.assert_allclose(
        images[:20], keras.ops.convert_to_numpy(expected) / 127.5 - 1, atol=1e-5
    )
