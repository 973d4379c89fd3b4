"""Expert choice: cases to check by hand, and what must always hold."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops import SlotPlan, expert_choice
from tests.compare import assert_close, assert_same, to_numpy
from tests.ops import reference

# (G, S, E, C)
SHAPES = [(2, 6, 4, 2), (1, 5, 3, 5), (2, 3, 6, 1)]
some = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def route(affinity, gates, capacity, mask=None, normalize_gates=None):
    """The plan in NumPy."""
    options = {"normalize_gates": normalize_gates}
    plan = expert_choice(affinity, gates, capacity, mask, **options)
    return SlotPlan(*map(to_numpy, plan))


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
    assert_same(plan, expected)
    dispatched, combined = map(to_numpy, plan.assignments())
    assert_same(dispatched, expected[1] >= 0)
    assert_same(combined, np.where(expected[1] >= 0, gates, 0))
    # Every expert serves as many as it can.
    wanted = np.minimum(mask.sum(axis=1), capacity)[:, None]
    assert_same(dispatched.sum(axis=1), np.broadcast_to(wanted, (groups, experts)))


def test_forbidden_pairs_and_normalised_gates_by_hand():
    affinity = np.array([[[-np.inf, 0.1], [0.5, -np.inf], [-np.inf, -np.inf]]])
    plan = route(affinity.astype("float32"), np.ones((1, 3, 2), "float32"), 2)
    assert_same(plan.slot_tokens, [[[1, -1], [0, -1]]])
    assert_same(plan.slot_weights, [[[1, 0], [1, 0]]])
    gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]], "float32")
    plan = route(gates, gates, 2, normalize_gates="after")
    assert_same(plan.slot_tokens, [[[1, 0], [2, 0]]])
    # Token 0 is with both experts, 1 and 2 with one each.
    assert_close(plan.slot_weights, [[[1, 0.6], [1, 0.4]]], 1e-6)
    # No NaN where a token's gates are all zero.
    plan = route(gates, np.zeros_like(gates), 2, normalize_gates="after")
    assert_same(plan.slot_weights, np.zeros((1, 2, 2)))


def test_empty_slots_are_never_read():
    mask = np.array([[True, False, False]])
    gates = np.ones((1, 3, 2), "float32")
    plan = route(gates, gates, 2, mask)
    plan = SlotPlan(*map(keras.ops.convert_to_tensor, plan))
    tokens = np.full((1, 3, 4), np.nan, "float32")
    tokens[0, 0] = 1.0
    inputs = to_numpy(plan.dispatch(tokens))
    assert_same(inputs[0, :, 0], np.ones((2, 4)))
    assert_same(inputs[0, :, 1], np.zeros((2, 4)))
    outputs = np.full((1, 2, 2, 4), np.inf, "float32")
    outputs[:, :, 0] = 1.0
    combined = to_numpy(plan.combine(outputs))
    assert_same(combined[0], [[2.0] * 4, [0.0] * 4, [0.0] * 4])


@pytest.mark.every_backend
def test_an_empty_batch():
    gates = np.zeros((0, 3, 2), "float32")
    plan = SlotPlan(*map(keras.ops.convert_to_tensor, route(gates, gates, 1)))
    inputs = plan.dispatch(np.zeros((0, 3, 4), "float32"))
    assert tuple(inputs.shape) == (0, 2, 1, 4)
    assert tuple(plan.combine(inputs).shape) == (0, 3, 4)
