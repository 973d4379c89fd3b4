import keras
import numpy as np
import pytest

from keras_moe.data import load_digits
from keras_moe.data.digits import read_pixels


def rows(images):
    return {image.tobytes() for image in images}


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


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (5, 13, 3), (3, 40, 1)])
def test_resizing_is_that_of_keras(shape):
    pixels, _ = read_pixels("test")
    expected = keras.ops.image.resize(
        pixels, shape[:2], "bilinear", antialias=False, data_format="channels_last"
    )
    expected = keras.ops.convert_to_numpy(expected) / 127.5 - 1
    images, labels = load_digits("test", shape)
    np.testing.assert_allclose(images, np.repeat(expected, shape[2], -1), atol=1e-5)
    assert (images.dtype, labels.dtype) == ("float32", "int32")
    assert (images.min(), set(labels)) == (-1, set(range(10)))
    assert images.max() <= 1
