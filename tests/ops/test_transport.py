"""Sinkhorn: golden gradients, a float64 reference, and hard cases."""

import keras
import numpy as np
import pytest

from keras_moe.ops import sinkhorn
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, to_numpy
from tests.gradients import gradient


def solve(logits, iterations=20, mask=None):
    """The transport in NumPy."""
    logits = keras.ops.convert_to_tensor(logits.astype("float32"))
    return [to_numpy(x) for x in sinkhorn(logits, iterations, mask)]


def reference(logits, iterations):
    """The textbook's log form in float64, from potentials of zero."""
    logits = np.asarray(logits, "float64")
    _, tokens, experts = logits.shape
    rows = np.zeros(logits.shape[:2])

    def log_sum_exp(x, axis):
        largest = x.max(axis=axis, keepdims=True)
        return np.log(np.exp(x - largest).sum(axis=axis)) + largest.squeeze(axis)

    for _ in range(iterations):
        columns = np.log(tokens / experts) - log_sum_exp(logits + rows[..., None], 1)
        rows = -log_sum_exp(logits + columns[:, None], 2)
    return np.exp(logits + rows[..., None] + columns[:, None])


# The routers' tests cover the noise of training.
CASES = [x for x in golden.cases("04_ot_routers/kl_*") if "training_noise" not in x]


@pytest.mark.parametrize(
    "case",
    every_backend_for(
        [x for x in CASES if "lbfgs" not in x], "kl_token_k1_plan_combine"
    ),
)
def test_golden_gradient(case):
    arrays, config = golden.load(case)
    iterations = config["maxiter"] // 10 * 10

    def scalar(logits):
        plan = sinkhorn(logits, iterations).plan
        return keras.ops.sum(keras.ops.multiply(plan, arrays["inputs/cotangent_plan"]))

    (actual,) = gradient(scalar, arrays["inputs/logits"])
    expected = arrays["grads/unrolled_plan/logits"]
    assert_close(actual, expected, 1e-3, 1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("iterations", [1, 6, 20])
def test_logits_of_any_size_follow_the_log_form(scale, iterations):
    logits = np.random.default_rng(0).normal(size=(2, 24, 5)) * scale
    # The same float32 numbers for both: at 1e4 one of their steps is 1e-3.
    logits = logits.astype("float32")
    plan, rows, columns = solve(logits, iterations)
    # Potentials of the logits' size have the float32 spacing of that size.
    atol = 2e-5 + 1e-6 * scale
    assert_close(plan, reference(logits, iterations), atol=atol)
    assert_close(rows, 1.0, 1e-5)
    assert_close(plan.sum(axis=1), columns, 1e-5, 1e-6)
    assert (plan >= 0).all()


def test_masked_tokens_have_no_mass_and_change_nothing():
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(1, 9, 3)).astype("float32")
    padded = np.concatenate([logits, np.full((1, 3, 3), 1e4)], axis=1)
    padded[0, 10] = np.nan
    mask = np.arange(12)[None] < 9
    plan, rows, columns = solve(padded, mask=mask)
    assert_close(plan[:, :9], solve(logits)[0], atol=1e-6)
    assert (plan[:, 9:] == 0).all()
    assert (rows[:, 9:] == 0).all()
    assert_close(columns.sum(), 9.0, 1e-5)
    nobody = solve(logits, mask=np.zeros((1, 9), bool))
    assert all((x == 0).all() for x in nobody)


def test_minus_infinity_forbids_a_pair():
    logits = np.full((1, 6, 3), -np.inf)
    logits[0, np.arange(6), np.arange(6) % 2] = 0.0  # nobody may go to expert 2
    plan, rows, columns = solve(logits)
    assert_close(plan, np.isfinite(logits).astype(float), atol=1e-6)
    assert_close(rows, 1.0)
    assert_close(columns, [[3.0, 3.0, 0.0]])

    def scalar(logits):
        cotangent = np.arange(18, dtype="float32").reshape(1, 6, 3)
        return keras.ops.sum(keras.ops.multiply(sinkhorn(logits).plan, cotangent))

    (actual,) = gradient(scalar, logits.astype("float32"))
    assert np.isfinite(actual).all()
