"""Token choice where the last experts act in place: slots for the first ones only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops import (
    ExpertTypes,
    dropless_token_choice,
    expert_capacity,
    expert_types,
    heterogeneous_capacity,
    token_choice,
)
from tests.compare import assert_close, assert_same, to_numpy
from tests.ops import reference
from tests.refusals import refuses

some = settings(max_examples=15, deadline=None, derandomize=True, database=None)
# (G, S, E, Z, K, C, C_in_place)
PROBLEMS = [(2, 7, 6, 3, 2, 2, 3), (1, 9, 4, 1, 3, 1, 1), (2, 5, 5, 4, 2, 4, None)]


@some
@given(
    problem=st.sampled_from(PROBLEMS),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.4]),
    priority=st.sampled_from(["first_come", "max_gate"]),
)
def test_each_kind_serves_its_capacity_in_order(problem, seed, ties, masked, priority):
    groups, tokens, experts, in_place, selected, capacity, in_place_capacity = problem
    generator = np.random.default_rng(seed)
    gates = generator.random((groups, tokens, experts)).astype("float32")
    if ties:
        gates = np.round(gates * 4) / 4
    mask = generator.random((groups, tokens)) >= masked
    in_place_options = {
        "in_place_experts": in_place,
        "in_place_capacity": in_place_capacity,
    }
    plan = token_choice(
        gates, gates, selected, capacity, priority, mask, **in_place_options
    )
    # With room for all a slot's position is the place in the expert's queue.
    _, slots, _ = reference.token_choice(
        gates, gates, selected, tokens, priority=priority, mask=mask
    )
    limits = np.full(experts, capacity)
    limits[experts - in_place :] = in_place_capacity or tokens
    expert, place = slots // tokens, slots % tokens
    kept = (slots >= 0) & (place < limits[expert])
    expected = np.zeros((groups, tokens, experts), "float32")
    for g, s, k in np.argwhere(kept):
        expected[g, s, expert[g, s, k]] = 1
    dispatched, combined = map(to_numpy, plan.assignments())
    assert_same(dispatched, expected)
    assert_same(combined, expected * gates)
    assert np.all(dispatched.sum(axis=1) <= limits)
    # Only the first experts have slots, and each slot its token.
    slot_tokens = to_numpy(plan.plan.slot_tokens)
    assert slot_tokens.shape == (groups, experts - in_place, capacity)
    for g in range(groups):
        for e in range(experts - in_place):
            held = [token for token in slot_tokens[g, e] if token >= 0]
            assert sorted(held) == np.flatnonzero(expected[g, :, e]).tolist()


def test_dropped_choices_by_hand():
    # Two FFN experts and one in place, one place each; all tokens want 2, then 0.
    gates = np.array([[[0.3, 0.1, 0.6], [0.3, 0.2, 0.5]]], "float32")
    in_place = {"in_place_experts": 1, "in_place_capacity": 1}
    plan = token_choice(gates, gates, 2, 1, normalize_gates="after", **in_place)
    assert to_numpy(plan.plan.token_slots).tolist() == [[[-1, 0], [-1, -1]]]
    assert_close(plan.assignments()[1], [[[1 / 3, 0, 2 / 3], [0, 0, 0]]], 1e-6)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("capacity", [2, None])
def test_it_moves_the_tokens_of_the_experts_with_slots_or_rows(dense, capacity):
    gates = np.array([[[0.2, 0.5, 0.3], [0.4, 0.1, 0.5]]], "float32")
    if capacity is None:
        plan = dropless_token_choice(gates, gates, 2, in_place_experts=1)
    else:
        plan = token_choice(gates, gates, 2, capacity=capacity, in_place_experts=1)
    assert (plan.group_sizes is None) == (capacity is not None)
    plan = plan.dense() if dense else plan
    inputs = plan.dispatch(np.array([[[1.0], [10.0]]], "float32"))
    # Token 0 goes to experts 1 and 2, token 1 to experts 0 and 2; 2 acts in place.
    assert_close(plan.combine(inputs), [[[0.5], [4.0]]], 1e-6)
    assert_close(plan.in_place_weights, [[[0.3], [0.5]]], 1e-6)
    refuses(r"tokens.shape=\(1, 3, 1\)", plan.dispatch, np.zeros((1, 3, 1), "float32"))


def test_equations_8_and_10():
    assert expert_types(32, 1, 1, "auto") == ExpertTypes(32, 1, 1, 6)
    assert expert_types(16, 1, 1, "auto") == ExpertTypes(16, 1, 1, 2)
    # Equation 10's maximum; the paper's own model of 8 experts has two.
    assert expert_types(8, 1, 1, "auto") == ExpertTypes(8, 1, 1, 1)
    # 1.1 * 800 / 10 is 88 exactly, and one more in binary.
    types = ExpertTypes(8, 1, 1, 2)
    assert heterogeneous_capacity(400, types, 0.75, 1.1, 2) == (66, 88)
    # A tau that no float holds: weights of 20 / 3.
    assert heterogeneous_capacity(40, types, 1 / 3, 1.0) == (2, 6)


@given(
    tokens=st.integers(1, 500), ffn=st.integers(1, 40), in_place=st.integers(0, 12),
    tau=st.floats(0.05, 2.0), factor=st.floats(1.0, 3.0), selected=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_capacities(tokens, ffn, in_place, tau, factor, selected):
    expert_types = ExpertTypes(ffn, zero=in_place)
    actual = heterogeneous_capacity(tokens, expert_types, tau, factor, selected)
    if not in_place:
        assert actual == (expert_capacity(tokens, ffn, factor, selected), None)
        return
    own, other = actual
    # Room for all assignments, and shares as tau says, up to the rounding.
    assert own * ffn + other * in_place >= tokens * selected * 0.999
    assert own - 1 < other * tau + 1e-6
    assert other - 1 < own / tau + 1e-6


@pytest.mark.parametrize(
    ("tokens", "expected"), [(35, (3, 4)), (25, (2, 2)), (20, (2, 2)), (15, (1, 2))]
)
def test_capacities_round_half_to_even(tokens, expected):
    """tau * 8 + 4 = 10: 3.5 goes to 4, 2.5 to 2, and 1.5 to 2."""
    expert_types = ExpertTypes(8, 1, 1, 2)
    actual = heterogeneous_capacity(tokens, expert_types, 0.75, 1.0, rounding="round")
    assert actual == expected
    # Binary numbers do not hold the tenth of ten times as many tokens.
    actual = heterogeneous_capacity(
        10 * tokens, expert_types, 0.75, 0.1, rounding="round"
    )
    assert actual == expected
