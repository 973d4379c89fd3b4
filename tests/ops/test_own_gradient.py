"""Gradients written by hand against differentiation."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import entmax
from keras_moe.ops.entmax import entmax15_and_source
from keras_moe.ops.factor_products import merged_matmul, mixed, projections
from keras_moe.ops.own_gradient import with_own_gradient
from tests.gradients import gradient, gradient_and_outputs

BACKEND = keras.backend.backend()
generator = np.random.default_rng(0)
X, Y = (generator.normal(size=(2, 3)).astype("float32") for _ in range(2))


@pytest.mark.every_backend
def test_of_several_inputs_and_outputs():
    def forward(x, y):
        return (x * y, x + y), (x, y)

    def backward(kept, of_product, of_sum):
        x, y = kept
        return of_product * y + of_sum, of_product * x + of_sum

    def total(outputs):
        product, added = outputs
        return ops.sum(product * product) + ops.sum(3.0 * added)

    gradients = gradient(
        lambda *xs: total(with_own_gradient(forward, backward, *xs)), X, Y
    )
    expected = gradient(lambda *xs: total(forward(*xs)[0]), X, Y)
    for one, other in zip(gradients, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6)


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
        for one, other in zip(mine, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's reference counts")
def test_nothing_waits_for_the_garbage_collector():
    import torch

    gc.disable()
    try:
        gates = entmax(torch.tensor(X, requires_grad=True))
        gone = weakref.ref(gates)
        gates.sum().backward()
        del gates
        assert gone() is None
    finally:
        gc.enable()


def by_entmax(logits, factor):
    return merged_matmul(_times, _times_gradients, factor, [entmax(logits)])


def by_sources(logits, factor):
    gates, source = entmax15_and_source(logits)
    return merged_matmul(_times, _times_gradients, factor, [gates], [source])


def by_mixed(logits, factor):
    gates, source = entmax15_and_source(logits)
    return mixed(gates, ops.transpose(factor), source)


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
        for one, other in zip(mine, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="one nested tape is enough")
@pytest.mark.parametrize("again", [False, True])
def test_second_derivatives(again):
    x = np.array([0.3, -0.2, 0.1, -4.0], "float32")
    w = np.array([1.0, 2.0, -1.0, 3.0], "float32")
    entmax15 = entmax if not again else lambda x: entmax15_and_source(x)[0]
    if BACKEND == "jax":
        import jax

        actual = jax.grad(
            lambda x: (jax.grad(lambda x: (entmax15(x) * w).sum())(x) * w).sum()
        )(x)
    else:
        import torch

        x, w = torch.tensor(x, requires_grad=True), torch.tensor(w)
        (first,) = torch.autograd.grad((entmax15(x) * w).sum(), x, create_graph=True)
        (actual,) = torch.autograd.grad((first * w).sum(), x)
    # By central differences of the first, in float64.
    expected = [-0.850316, 0.425158, 0.425158, 0.0]
    np.testing.assert_allclose(ops.convert_to_numpy(actual), expected, atol=1e-4)
