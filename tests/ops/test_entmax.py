"""alpha-entmax against the entmax package's numbers, and what defines it."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import entmax
from tests import golden
from tests.compare import assert_close, to_numpy
from tests.gradients import gradient, one_program

BACKEND = keras.backend.backend()
ALPHAS = (1.05, 1.25, 1.3, 1.5, 1.75, 2.0)


def exact(logits, alpha):
    """By bisection in float64, over the last axis."""
    z = (alpha - 1) * np.asarray(logits, "float64")
    z = z - z.max(axis=-1, keepdims=True)
    low = np.full((*z.shape[:-1], 1), -1.0)
    high = np.zeros_like(low)
    for _ in range(60):
        tau = (low + high) / 2
        total = (np.maximum(z - tau, 0) ** (1 / (alpha - 1))).sum(-1, keepdims=True)
        low, high = np.where(total >= 1, tau, low), np.where(total >= 1, high, tau)
    gates = np.maximum(z - low, 0) ** (1 / (alpha - 1))
    return gates / gates.sum(axis=-1, keepdims=True)


ARRAYS, CONFIG = golden.load("10_mumoe/entmax15")


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "name", sorted({key.split("/")[1] for key in ARRAYS if key.startswith("inputs/")})
)
def test_reference(name):
    x, cotangent = ARRAYS[f"inputs/{name}/x"], ARRAYS[f"inputs/{name}/cotangent"]
    axis = 1 if name == "axis1" else -1
    actual = to_numpy(entmax(x, axis=axis))
    assert_close(actual, ARRAYS[f"outputs/{name}/y"], atol=CONFIG["atol"])
    (slope,) = gradient(
        lambda x: ops.sum(ops.multiply(entmax(x, axis=axis), cotangent)), x
    )
    assert_close(slope, ARRAYS[f"grads/{name}/x"], 1e-4, 1e-5)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("size", [2, 64, 512])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_exact_for_any_alpha(alpha, size, spread):
    generator = np.random.default_rng(size)
    logits = (spread * generator.normal(size=(4, size))).astype("float32")
    program = one_program(lambda x: entmax(x, alpha))
    actual = to_numpy(program(ops.convert_to_tensor(logits)))
    assert_close(actual, exact(logits, alpha), atol=3e-6)
    assert_close(actual.sum(axis=-1), 1.0, 1e-6)


@pytest.mark.parametrize("size", [1, 16384])
def test_one_logit_and_very_many(size):
    generator = np.random.default_rng(3)
    spread = np.array([[0.5], [1.0], [3.0], [0.0]])
    logits = (spread * generator.normal(size=(4, size))).astype("float32")
    # Nearly all of the weight where most are alike: the slowest there is to find.
    logits[3] = -1.6 * np.linspace(0, 1, size) ** 0.3
    program = one_program(entmax)
    actual = to_numpy(program(ops.convert_to_tensor(logits)))
    assert_close(actual, exact(logits, 1.5), atol=1e-6)


def test_masked_logits_get_nothing():
    logits = np.array([[1.0, -np.inf, 0.5], [-np.inf, 2.0, -np.inf]], "float32")
    actual = to_numpy(entmax(logits))
    assert_close(actual[0, [0, 2]], exact([1.0, 0.5], 1.5), atol=1e-6)
    assert_close(actual[:, [1]].T, [[0, 1]], atol=1e-6)
    (slope,) = gradient(lambda x: ops.sum(entmax(x)[..., 0]), logits)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_is_that_of_the_function(alpha):
    generator = np.random.default_rng(1)
    logits = generator.normal(size=6).astype("float32")
    weights = generator.normal(size=6)
    (actual,) = gradient(
        lambda x: ops.sum(ops.multiply(entmax(x, alpha), weights.astype("float32"))),
        logits,
    )
    steps = 1e-6 * np.eye(6)
    change = exact(logits + steps, alpha) - exact(logits - steps, alpha)
    assert_close(actual, change @ weights / 2e-6, atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_logits_of_any_size(alpha):
    logits = np.array([[3e30, 1e30, -3e38], [-1e9, -1e9, -2e9]], "float32")
    actual = to_numpy(entmax(logits, alpha))
    assert_close(actual, [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)
    (slope,) = gradient(lambda x: ops.sum(entmax(x, alpha)[..., 0]), logits)
    assert np.isfinite(slope).all()


def test_half_precision_is_computed_in_float32():
    logits = ops.cast(np.array([[0.0, 0.125, 0.25]], "float32"), "bfloat16")
    actual = entmax(logits)
    assert keras.backend.standardize_dtype(actual.dtype) == "bfloat16"
    actual = ops.cast(actual, "float32")[0]
    assert_close(actual, exact([0, 0.125, 0.25], 1.5), atol=4e-3)


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel for PyTorch")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_kernel_is_the_reference(alpha):
    from keras_moe.ops.entmax import (
        entmax_gradient_reference,
        entmax_power,
        solve_reference,
    )
    from keras_moe.ops.kernels import _nn_torch

    generator = np.random.default_rng(0)
    shape = (2, 3, 64)
    scores = ops.convert_to_tensor(3 * generator.normal(size=shape).astype("float32"))
    upstream = ops.convert_to_tensor(generator.normal(size=shape).astype("float32"))
    actual = _nn_torch.entmax(scores, alpha, entmax_power(alpha), 10)
    expected = solve_reference(scores, alpha, 10)
    assert_close(actual, expected, 1e-5, 1e-6)
    gates = expected[0]
    forms = _nn_torch.entmax_gradient, entmax_gradient_reference
    slopes = (form(gates, upstream, alpha) for form in forms)
    assert_close(*slopes, 1e-5, 1e-6)
    # Entries that are out are exactly zero: rounding raises none of them.
    assert ((actual[0] > 0) == (scores > actual[1] + actual[2] / (alpha - 1))).all()
    for empty in [(0, 3), (2, 0, 3)]:
        assert _nn_torch.entmax(ops.zeros(empty), alpha, 2.0, 1)[0].shape == empty


@pytest.mark.parametrize("alpha", [1.001, 1.01])
def test_near_one_it_is_softmax(alpha):
    logits, weights = np.random.default_rng(4).normal(size=(2, 3, 8)).astype("float32")
    gates, softmax = to_numpy(entmax(logits, alpha)), to_numpy(ops.softmax(logits))
    assert_close(gates, softmax, atol=alpha - 1)
    actual, expected = (
        gradient(lambda x, f=form: ops.sum(ops.multiply(f(x), weights)), logits)
        for form in (lambda x: entmax(x, alpha), ops.softmax)
    )
    assert_close(actual, expected, atol=2 * (alpha - 1))


@pytest.mark.every_backend
def test_few_steps_are_enough_for_inputs_made_to_be_hard():
    """Levels of ties, near the threshold of the largest alone."""
    generator = np.random.default_rng(5)
    rows, size = 400, 512
    for alpha in (1.1, 1.25, 1.35, 1.45):
        ties = np.exp(generator.random(rows) ** 2 * np.log(size / 4)).astype(int)
        thresholds = -(ties ** (1 - alpha))
        logits = np.full((rows, size), -np.inf)
        for row, (count, threshold) in enumerate(zip(ties, thresholds)):
            near = 10 ** generator.uniform(-5, 0, 2) * generator.choice([-1, 1], 2)
            middle = count + int(np.exp(generator.random() * np.log(size / 4)))
            logits[row, :count] = 0
            logits[row, count:middle] = min(threshold * (1 + near[0]), 0)
            logits[row, middle:] = min(threshold * (1 + near[1]), 0)
        logits = (logits / (alpha - 1)).astype("float32")
        expected = exact(logits, alpha)
        actual = to_numpy(one_program(lambda x, a=alpha: entmax(x, a))(logits))
        assert_close(actual, expected, atol=3e-6, err_msg=str(alpha))


@pytest.mark.parametrize(
    "counts",
    [{0.0: 2, -1.41238: 1157, -1.51573: 15154}, {0.0: 2, -1.41321: 2035, -1.6445: 1}],
)
def test_logits_that_crowd_below_the_threshold(counts):
    """Newton's steps are slow where many logits have nearly no share."""
    logits = np.repeat(list(counts), list(counts.values())).astype("float32")
    actual = to_numpy(entmax(logits))
    expected = exact(logits, 1.5)
    assert_close(actual, expected, atol=1e-6)
    assert np.abs(actual - expected).sum() < 1e-4
