"""Products of muMoE with factors against autodiff of plain matmuls."""

import numpy as np
import pytest
from keras import ops

from keras_moe.ops import entmax
from keras_moe.ops._multilinear import _merged_matmul, _mixed, projections
from keras_moe.ops.entmax import entmax15_and_source
from tests.compare import assert_close
from tests.gradients import gradient_and_outputs

generator = np.random.default_rng(0)


@pytest.mark.every_backend
def test_projections_are_matmuls():
    inputs = generator.normal(size=(2, 3, 4)).astype("float32")
    shapes = ((4, 5), (5, 2), (4, 1))
    matrices = [generator.normal(size=shape).astype("float32") for shape in shapes]

    def plain(x, *matrices):
        ones = ops.ones_like(x[..., :1])
        return [
            ops.matmul(x if m.shape[0] == 4 else ops.concatenate([x, ones], -1), m)
            for m in matrices
        ]

    def loss(function):
        def run(*tensors):
            outputs = list(function(*tensors))
            return sum(ops.sum(ops.sin(y)) for y in outputs), outputs

        return run

    actual = gradient_and_outputs(loss(projections), inputs, *matrices)
    expected = gradient_and_outputs(loss(plain), inputs, *matrices)
    for mine, theirs in zip(actual, expected):
        assert_close(mine, theirs, 1e-5, 1e-6)


def by_entmax(logits, factor):
    return _merged_matmul(_times, _times_gradients, factor, [entmax(logits)])


def by_sources(logits, factor):
    gates, source = entmax15_and_source(logits)
    return _merged_matmul(_times, _times_gradients, factor, [gates], [source])


def by_mixed(logits, factor):
    gates, source = entmax15_and_source(logits)
    return _mixed(gates, ops.transpose(factor), source)


def _times(gates):
    return 1.0 * gates


def _times_gradients(upstream, gates):
    return (upstream,)


@pytest.mark.every_backend
@pytest.mark.parametrize("function", [by_sources, by_mixed])
def test_gates_computed_again_have_the_gradients_of_those_kept(function):
    logits = (3 * generator.normal(size=(2, 4, 6))).astype("float32")
    factor = generator.normal(size=(5, 6)).astype("float32")
    weights = generator.normal(size=(2, 4, 5)).astype("float32")

    def loss(function):
        def run(*tensors):
            y = function(*tensors)
            return ops.sum(ops.multiply(ops.sin(y), weights)), [y]

        return run

    actual = gradient_and_outputs(loss(function), logits, factor)
    expected = gradient_and_outputs(loss(by_entmax), logits, factor)
    for mine, theirs in zip(actual, expected):
        assert_close(mine, theirs, 1e-5, 1e-6)
