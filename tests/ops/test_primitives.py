"""Custom gradients against autodiff, and powers."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import entmax
from keras_moe.ops.entmax import entmax15_and_source
from keras_moe.ops.primitives import custom_gradient, real_power
from tests.compare import assert_close
from tests.gradients import gradient

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
        lambda *xs: total(custom_gradient(forward, backward, *xs)), X, Y
    )
    expected = gradient(lambda *xs: total(forward(*xs)[0]), X, Y)
    assert_close(gradients, expected, 1e-6)


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


@pytest.mark.every_backend
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
    assert_close(actual, expected, atol=1e-4)


@pytest.mark.every_backend
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1, 2.5, 3, 4, 7, 16])
def test_powers_by_roots_and_products(exponent):
    x = np.array([0.0, 1e-30, 1e-3, 0.7, 1.0, 3.0], "float32")
    actual, expected = (
        ops.convert_to_numpy(real_power(x, exponent)),
        x.astype("float64") ** exponent,
    )
    assert_close(actual, expected, 2e-5, 1e-37)
    (slope,) = gradient(lambda x: ops.sum(real_power(x, exponent)), x[3:])
    rises = exponent * x[3:].astype("float64") ** (exponent - 1)
    assert_close(slope, rises, 2e-5)
