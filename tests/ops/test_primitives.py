"""Custom gradients against autodiff, and powers."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import entmax
from keras_moe.ops._primitives import custom_gradient, remat
from keras_moe.ops.entmax import entmax15_and_source
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


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's control flow")
@pytest.mark.parametrize("compiled", [False, True])
def test_tensorflow_finds_the_gradient_within_loops_branches_and_functions(compiled):
    import tensorflow as tf

    def forward(x):
        return x * x, (x,)

    def triple(x):
        # A gradient that nobody can mistake for autodiff's, which is 2x.
        return custom_gradient(forward, lambda kept, dy: (3.0 * dy * kept[0],), x)

    def in_loop(x):
        step = lambda i, x: (i + 1, triple(x))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 2, step, (0, x), maximum_iterations=2)[1]

    def in_branch(x):
        return tf.cond(x > 0, lambda: tf.function(triple)(x), lambda: x)

    def slopes(x):
        functions = triple, in_loop, in_branch, remat(triple)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            results = [function(x) for function in functions]
        return [tape.gradient(result, x) for result in results]

    slopes = tf.function(slopes, jit_compile=compiled)
    # 3x, and 3x^2 times 3x.
    assert [float(x) for x in slopes(tf.constant(2.0))] == [6.0, 72.0, 6.0, 6.0]


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
