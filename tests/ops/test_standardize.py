"""Standardisation against differentiation of what it says."""

import numpy as np
import pytest
from keras import ops

from keras_moe.ops.standardize import standardize
from tests.gradients import gradient_and_outputs

generator = np.random.default_rng(0)
X = (3.0 + generator.normal(size=(4, 3, 5))).astype("float32")
WEIGHTS = generator.normal(size=(3, 4, 3, 5)).astype("float32")
MASK = generator.random((4, 3)) < 0.7
EPSILON = 1e-2


def plain(x, axes, mask=None):
    part = 1.0 if mask is None else ops.cast(mask, "float32")[..., None]
    count = ops.sum(part * ops.ones_like(x), axes, keepdims=True)
    mean = ops.sum(part * x, axes, keepdims=True) / count
    centred = x - mean
    variance = ops.sum(part * centred * centred, axes, keepdims=True) / count
    return centred / ops.sqrt(variance + EPSILON), mean, variance


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("axes", "mask"), [((0, 1), None), ((-1,), None), ((0, 1), MASK)]
)
def test_outputs_and_gradient(axes, mask):
    """All outputs have a part in the loss, padded rows too."""

    def loss(function):
        def run(x):
            outputs = list(function(x))
            terms = (
                ops.sum(ops.multiply(ops.sin(y), w)) for y, w in zip(outputs, WEIGHTS)
            )
            return sum(terms), outputs

        return run

    actual = gradient_and_outputs(
        loss(lambda x: standardize(x, axes, EPSILON, mask)), X
    )
    expected = gradient_and_outputs(loss(lambda x: plain(x, axes, mask)), X)
    for mine, theirs in zip(actual, expected):
        for one, other in zip(mine, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_and_nan_in_the_padding():
    x = np.where(MASK[..., None], X, np.nan)
    y, mean, _ = standardize(x, (0, 1), EPSILON, MASK)
    expected, expected_mean, _ = standardize(X, (0, 1), EPSILON, MASK)
    for one, other in ((y, expected), (mean, expected_mean)):
        one, other = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
        rows = MASK if one.shape == X.shape else ...
        np.testing.assert_array_equal(one[rows], other[rows])
    for empty, mask in ((X[:0], None), (X, np.zeros_like(MASK))):
        outputs = standardize(empty, (0, 1), EPSILON, mask)
        shapes = [tuple(value.shape) for value in outputs]
        assert shapes == [empty.shape, (1, 1, 5), (1, 1, 5)]
