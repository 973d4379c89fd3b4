"""Sparsity-constrained transport: small cases, and what must always hold."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops.sparse_transport import (
    ITERATIONS,
    potentials,
    project,
    sparse_transport,
)
from keras_moe.ops.transport import Transport
from tests.compare import assert_close
from tests.gradients import compiled, gradient

SOLVERS = ("newton", "adam")
# Few shapes, so that few programs are compiled: (G, S, E, bound).
SHAPES = [(2, 8, 4, 2), (1, 3, 6, 1)]

some = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@functools.cache
def _program(side, max_nonzeros, solver, iterations):
    def program(utility, mask):
        options = {"iterations": iterations, "mask": mask}
        return sparse_transport(utility, side, max_nonzeros, solver, **options)

    return compiled(program)


def transport(utility, side, max_nonzeros, solver="newton", iterations=None, mask=None):
    """The transport in NumPy, computed as in training."""
    mask = np.ones(utility.shape[:2], bool) if mask is None else mask
    outputs = _program(side, max_nonzeros, solver, iterations)(
        *map(keras.ops.convert_to_tensor, (utility, mask))
    )
    return Transport(*map(keras.ops.convert_to_numpy, outputs))


def random_utility(seed, shape, std=1.0, ties=False):
    generator = np.random.default_rng(seed)
    if ties:  # Eighths: equal values are frequent.
        return generator.integers(0, 3, shape).astype("float32") / 8
    exp = np.exp(std * generator.normal(size=shape))
    return (exp / exp.sum(axis=-1, keepdims=True)).astype("float32")


def solve_with_objective(utility, side, max_nonzeros):
    """The transport and the semi-dual objective (G,) of each solver, in NumPy."""
    share = utility.shape[1] / utility.shape[2]

    def program(utility, of_tokens, of_experts):
        if side == "token":
            values, mass, target = utility, of_tokens, of_experts
        else:
            values = keras.ops.swapaxes(utility, 1, 2)
            mass, target = of_experts, keras.ops.swapaxes(of_tokens, 1, 2)
        results = []
        for solver in SOLVERS:
            steps = ITERATIONS[solver]
            problem = mass, target, side, max_nonzeros
            solution, _ = potentials(values, *problem, solver, steps)
            # The semi-dual, which solvers minimise.
            raised = values + solution
            best = project(raised, values > -1.0, mass, max_nonzeros)
            worth = keras.ops.sum(best * (raised - 0.5 * best), axis=(1, 2))
            worth = worth - keras.ops.sum(target * solution, axis=(1, 2))
            results.append(
                (sparse_transport(utility, side, max_nonzeros, solver), worth)
            )
        return results

    ones = np.ones((1, utility.shape[1], 1), "float32")
    arrays = utility, ones, np.full((1, 1, 1), share, "float32")
    results = compiled(program)(*map(keras.ops.convert_to_tensor, arrays))
    to_numpy = keras.ops.convert_to_numpy
    return [(Transport(*map(to_numpy, t)), to_numpy(worth)) for t, worth in results]


@pytest.mark.parametrize("side", ["expert", "token"])
def test_a_balanced_assignment(side):
    # All prefer expert 0; the two that lose least go to expert 1.
    utility = np.array([[[0.9, 0.1], [0.5, 0.5], [0.8, 0.2], [0.6, 0.4]]], "float32")
    actual = transport(utility, side, 2 if side == "expert" else 1)
    expected = [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert_close(actual.plan[0], expected, atol=0.02)


def test_one_step_of_adam_on_the_expert_side():
    # At zero, expert 0 takes tokens 0 and 1 (mean 0.7), expert 1 takes 2 and 0: the
    # rows sum to 2.05, 0.9, 1.05 and 0, and the first step has the gradient's sign.
    utility = np.array([[[0.8, 0.2], [0.6, 0.1], [0.5, 0.3], [0.4, 0.0]]], "float32")
    actual = transport(utility, "expert", 2, "adam", 1)
    values = utility[0] + 0.01 * np.array([[-1], [1], [-1], [1]])
    expected = np.zeros((4, 2))
    for e, kept in enumerate([[0, 1], [0, 2]]):
        top = values[kept, e]
        expected[kept, e] = top - top.mean() + 1
    assert_close(actual.plan[0], expected, atol=1e-5)


@some
@given(
    st.sampled_from(SHAPES), st.integers(0, 2**16),
    st.sampled_from(["ties", "equal", "random"]), st.sampled_from(["expert", "token"]),
    st.sampled_from(SOLVERS), st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_bound_and_marginals(shape, seed, kind, side, solver, masked_share):
    groups, tokens, experts, bound = shape
    utility = random_utility(seed, (groups, tokens, experts), ties=kind == "ties")
    if kind == "equal":
        utility = np.full_like(utility, 0.25)
    mask = np.random.default_rng(seed).random((groups, tokens)) >= masked_share
    actual = transport(utility, side, bound, solver, 3, mask)
    assert np.all(np.isfinite(actual.plan))
    assert np.all(actual.plan >= 0)
    assert np.all(actual.plan[~mask] == 0)
    nonzeros = (actual.plan > 0).sum(axis=1 if side == "expert" else 2)
    assert nonzeros.max() <= bound
    assert_close(actual.plan.sum(2), actual.row_marginals, atol=1e-5)
    assert_close(actual.plan.sum(1), actual.column_marginals, atol=1e-5)
    real = mask.sum(axis=1, keepdims=True)
    if side == "expert":
        assert_close(
            actual.column_marginals, np.repeat(real / experts, experts, 1), atol=1e-4
        )
    else:
        assert_close(actual.row_marginals, mask, atol=1e-5)


@pytest.mark.parametrize(
    ("side", "shape", "bound"),
    [("expert", (128, 8), 16), ("expert", (1500, 4), 750), ("token", (128, 8), 1)],
)
def test_newton_is_no_worse_than_adam(side, shape, bound):
    # One group for each size of the logits.
    stds = (0.3, 1.0, 3.0)
    utility = np.stack([random_utility(i, shape, std) for i, std in enumerate(stds)])
    (newton, lower), (adam, upper) = solve_with_objective(utility, side, bound)
    assert np.all(lower <= upper + 1e-6 * np.abs(upper))
    errors = []
    for plan in (newton, adam):
        own, other = plan.column_marginals * shape[1] / shape[0], plan.row_marginals
        own, other = (own, other) if side == "expert" else (other, own)
        assert_close(own, np.ones_like(own), atol=1e-5)
        errors.append(np.abs(other - 1).mean(axis=1))
    assert np.all(errors[0] <= errors[1])


@pytest.mark.parametrize("side", ["expert", "token"])
def test_tokens_in_image_order_are_sampled_fairly(side):
    # 256 patches of 16 columns to an image; what a token likes follows its column.
    generator = np.random.default_rng(0)
    column = np.arange(2048) % 256 % 16
    logits = 2 * generator.normal(size=(16, 8))[column]
    logits = logits + 0.5 * generator.normal(size=(2048, 8))
    exp = np.exp(logits)[None]
    utility = (exp / exp.sum(axis=-1, keepdims=True)).astype("float32")
    mask = np.ones((1, 2048), bool)
    mask[:, ::2] = False
    for real, capacity in ((None, 256), (mask, 128)):
        bound = capacity if side == "expert" else 1
        plan = transport(utility, side, bound, mask=real)
        rows, columns = plan.row_marginals[0], plan.column_marginals[0]
        if real is not None:
            rows = rows[real[0]]
        error = np.abs(rows - 1).mean() if side == "expert" else 0.0
        balance = np.abs(columns / columns.mean() - 1).mean()
        assert max(error, balance) < 0.05, (error, balance)


@pytest.mark.parametrize("side", ["expert", "token"])
def test_without_a_bound_marginals_are_met(side):
    utility = random_utility(0, (2, 40, 4))
    actual = transport(utility, side, None)
    assert_close(actual.row_marginals, np.ones((2, 40)), atol=1e-3)
    assert_close(actual.column_marginals, np.full((2, 4), 10), atol=1e-2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("side", "bound"), [("expert", 3), ("token", 2)])
def test_masked_tokens_and_an_empty_group(side, bound, solver):
    utility = random_utility(0, (2, 12, 4))
    utility[0, 8:] = np.nan
    mask = np.zeros((2, 12), bool)
    mask[0, :8] = True
    actual = transport(utility, side, bound, solver, mask=mask)
    assert np.all(actual.plan[~mask] == 0)
    assert np.all(np.isfinite(actual.plan))
    total = actual.plan[0].sum()
    assert_close(total, 8, atol=1e-4)
    if solver == "newton" and side == "expert":
        without = transport(utility[:1, :8], side, bound)
        assert_close(actual.plan[:1, :8], without.plan, atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("side", ["expert", "token"])
def test_forbidden_pairs(side, solver):
    utility = random_utility(0, (2, 12, 4))
    utility[0, 2:6, 1] = -np.inf
    utility[0, 7] = -np.inf
    actual = transport(utility, side, 3 if side == "expert" else 2, solver)
    assert np.all(np.isfinite(actual.plan))
    assert np.all(actual.plan[np.isneginf(utility)] == 0)


@pytest.mark.parametrize("side", ["expert", "token"])
@pytest.mark.parametrize(("shape", "bound"), [
    pytest.param((1, 1, 3), 1, id="one token"),
    pytest.param((1, 6, 3), 50, id="a bound beyond all"),
    pytest.param((1, 9, 2), 1, id="a bound that no plan meets"),
])  # fmt: skip
def test_extreme_shapes(shape, bound, side):
    plan = transport(random_utility(0, shape), side, bound).plan
    assert np.all(np.isfinite(plan))
    assert (plan > 0).sum(axis=1 if side == "expert" else 2).max() <= bound
    assert_close(plan.sum(), shape[1], 1e-4)


@pytest.mark.every_backend
def test_eager_agrees_with_compiled():
    side, bound = "expert", 3
    utility = random_utility(0, (2, 12, 4))
    actual = sparse_transport(keras.ops.convert_to_tensor(utility), side, bound)
    assert_close(actual.plan, transport(utility, side, bound).plan, atol=2e-3)


@pytest.mark.every_backend
def test_gradient_is_that_of_the_projection():
    utility = random_utility(0, (1, 12, 4))
    weight = np.random.default_rng(1).normal(size=utility.shape).astype("float32")
    tensor = keras.ops.convert_to_tensor(weight)

    def weighted(utility):
        return keras.ops.sum(sparse_transport(utility, "expert", 3).plan * tensor)

    (actual,) = gradient(weighted, utility)
    active = transport(utility, "expert", 3).plan > 0
    mean = (weight * active).sum(1, keepdims=True) / active.sum(1, keepdims=True)
    assert_close(actual, active * (weight - mean), atol=1e-5)


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.function")
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("side", ["expert", "token"])
def test_unknown_sizes(side, solver):
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((None, None, 4)), tf.TensorSpec((), "int32")])  # fmt: skip # noqa: E501
    def program(utility, bound):
        return sparse_transport(utility, side, bound, solver)

    utility = random_utility(0, (2, 12, 4))
    bound = 3 if side == "expert" else 2
    actual = program(utility, bound)
    assert_close(actual.plan, transport(utility, side, bound, solver).plan, atol=2e-3)
