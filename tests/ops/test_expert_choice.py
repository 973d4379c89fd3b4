"""Expert choice: golden data, cases to check by hand, and what must always hold.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops import SlotPlan, expert_choice
from tests import golden
from tests.gradients import compiled, gradient_and_outputs, one_program
from tests.ops import reference

GOLDEN = golden.cases("02_expert_choice/*")
# Few shapes, so that few programs are compiled: (G, S, E, C).
SHAPES = [(2, 6, 4, 2), (1, 5, 3, 5), (2, 3, 6, 1)]
some = settings(max_examples=25, deadline=None, derandomize=True, database=None)
to_numpy = keras.ops.convert_to_numpy


@functools.cache
def _program(capacity, normalize_gates):
    return compiled(
        lambda affinity, gates, mask: expert_choice(
            affinity, gates, capacity, mask, normalize_gates
        )
    )


def route(affinity, gates=None, capacity=1, mask=None, normalize_gates=None):
    """The plan in NumPy, computed as in training."""
    gates = affinity if gates is None else gates
    mask = np.ones(affinity.shape[:2], bool) if mask is None else mask
    plan = _program(capacity, normalize_gates)(
        *map(keras.ops.convert_to_tensor, (affinity, gates, mask))
    )
    return SlotPlan(*map(to_numpy, plan))


@pytest.mark.every_backend
@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("form", ["index", "einsum"])
def test_golden_layer(case, form):
    """Masks exactly, and a whole layer with its gradients."""
    arrays, config = golden.load(case)
    grouped = config["G"] is not None
    batch = (lambda x: x) if grouped else (lambda x: x[None])
    capacity = int(arrays["outputs/capacity"])

    def layer(gates, x, kernel, bias):
        plan = expert_choice(gates, gates, capacity)
        dense = plan.dense()
        moves = plan if form == "index" else dense
        buffers = moves.dispatch(x)
        outputs = keras.ops.einsum("gecd,edf->gecf", buffers, kernel)
        combined = moves.combine(outputs + bias[:, None])
        cotangent = batch(arrays["inputs/cotangent"])
        value = keras.ops.sum(keras.ops.multiply(combined, cotangent))
        mask = keras.ops.cast(dense.dispatch_weights, "int32")
        return value, (mask, dense.combine_weights, buffers, combined)

    gradients, outputs = gradient_and_outputs(
        layer,
        batch(arrays["inputs/gates"]),
        batch(arrays["inputs/x"]),
        arrays["inputs/expert_kernel"],
        arrays["inputs/expert_bias"],
    )
    mask, weights, buffers, combined = outputs
    np.testing.assert_array_equal(mask > 0, batch(arrays["outputs/dispatch_mask"]))
    for actual, name in (
        (weights, "combine_weights"),
        (buffers, "buffers"),
        (combined, "combined"),
    ):
        expected = batch(arrays[f"outputs/{name}"])
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    for actual, name in zip(gradients, ("gates", "x", "expert_kernel", "expert_bias")):
        expected = arrays[f"grads/{name}"]
        expected = batch(expected) if name in ("gates", "x") else expected
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6, err_msg=name)


@some
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_follows_the_definition(shape, seed, ties, masked):
    groups, tokens, experts, capacity = shape
    generator = np.random.default_rng(seed)
    affinity, gates = generator.random((2, groups, tokens, experts)).astype("float32")
    if ties:
        affinity = np.round(affinity * 2) / 2
    mask = generator.random((groups, tokens)) >= masked
    plan = route(affinity, gates, capacity, mask)
    expected = reference.expert_choice(affinity, gates, capacity, mask)
    for actual, wanted in zip(plan, expected):
        np.testing.assert_array_equal(actual, wanted)
    dispatched, combined = map(to_numpy, plan.assignments())
    np.testing.assert_array_equal(dispatched, expected[1] >= 0)
    np.testing.assert_array_equal(combined, np.where(expected[1] >= 0, gates, 0))
    # Every expert serves as many as it can.
    wanted = np.minimum(mask.sum(axis=1), capacity)[:, None]
    np.testing.assert_array_equal(
        dispatched.sum(axis=1), np.broadcast_to(wanted, (groups, experts))
    )


def test_minus_infinity_forbids_a_pair():
    affinity = np.array([[[-np.inf, 0.1], [0.5, -np.inf], [-np.inf, -np.inf]]])
    plan = route(affinity.astype("float32"), np.ones((1, 3, 2), "float32"), 2)
    np.testing.assert_array_equal(plan.slot_tokens, [[[1, -1], [0, -1]]])
    np.testing.assert_array_equal(plan.slot_weights, [[[1, 0], [1, 0]]])


def test_gates_can_be_normalised_over_the_experts_that_took_the_token():
    gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]], "float32")
    plan = route(gates, gates, 2, normalize_gates="after")
    np.testing.assert_array_equal(plan.slot_tokens, [[[1, 0], [2, 0]]])
    # Token 0 is with both experts, 1 and 2 with one each.
    np.testing.assert_allclose(plan.slot_weights, [[[1, 0.6], [1, 0.4]]], rtol=1e-6)
    # No NaN where a token's gates are all zero.
    plan = route(gates, np.zeros_like(gates), 2, normalize_gates="after")
    np.testing.assert_array_equal(plan.slot_weights, np.zeros((1, 2, 2)))


def test_empty_slots_are_never_read():
    mask = np.array([[True, False, False]])
    gates = np.ones((1, 3, 2), "float32")
    plan = route(gates, gates, 2, mask)
    plan = SlotPlan(*map(keras.ops.convert_to_tensor, plan))
    tokens = np.full((1, 3, 4), np.nan, "float32")
    tokens[0, 0] = 1.0
    inputs = to_numpy(
        one_program(SlotPlan.dispatch)(plan, keras.ops.convert_to_tensor(tokens))
    )
    np.testing.assert_array_equal(inputs[0, :, 0], np.ones((2, 4)))
    np.testing.assert_array_equal(inputs[0, :, 1], np.zeros((2, 4)))
    outputs = np.full((1, 2, 2, 4), np.inf, "float32")
    outputs[:, :, 0] = 1.0
    outputs = keras.ops.convert_to_tensor(outputs)
    combined = to_numpy(one_program(SlotPlan.combine)(plan, outputs))
    np.testing.assert_array_equal(combined[0], [[2.0] * 4, [0.0] * 4, [0.0] * 4])
