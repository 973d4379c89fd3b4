"""Token choice: cases to check by hand, and what must always hold."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops import RoutingPlan, token_choice
from tests.compare import assert_same
from tests.gradients import compiled, gradient
from tests.ops import reference

PRIORITIES = ("first_come", "max_gate", "sum_gates")
# Few shapes, so that few programs are compiled: (G, S, E, K, C).
SHAPES = [
    *((2, 6, 4, 2, 2), (1, 5, 3, 1, 2), (2, 4, 6, 3, 1), (1, 7, 2, 2, 7)),
    # One expert, one token, and more capacity than tokens.
    *((2, 5, 1, 1, 3), (3, 1, 4, 2, 1), (1, 6, 3, 2, 50)),
]

some = settings(max_examples=45, deadline=None, derandomize=True, database=None)


def to_numpy(plan):
    return RoutingPlan(*(keras.ops.convert_to_numpy(field) for field in plan))


@functools.cache
def _program(num_selected_experts, capacity, priority):
    def program(affinity, gates, mask, *ranks):
        order = ranks[0] if ranks else priority
        plan = token_choice(
            affinity, gates, num_selected_experts, capacity, order, mask=mask
        )
        return plan, *plan.dense()

    return compiled(program)


def route_densely(
    affinity, gates, num_selected_experts, capacity, priority="first_come", mask=None
):
    """The plan and both dense masks in NumPy, computed as in training."""
    mask = np.ones(affinity.shape[:2], bool) if mask is None else mask
    arrays, name = [affinity, gates, mask], priority
    if not isinstance(priority, str):
        arrays, name = [*arrays, priority], None
    program = _program(num_selected_experts, capacity, name)
    plan, *dense = program(*map(keras.ops.convert_to_tensor, arrays))
    return to_numpy(plan), *map(keras.ops.convert_to_numpy, dense)


def route(affinity, *arguments, **options):
    """The plan in NumPy where the gates are the affinity."""
    return route_densely(affinity, affinity, *arguments, **options)[0]


def softmax(logits):
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (exp / exp.sum(axis=-1, keepdims=True)).astype("float32")


def random_gates(seed, shape, ties=False):
    generator = np.random.default_rng(seed)
    if ties:  # Eighths: exact in float32, equal values are frequent.
        return generator.integers(0, 4, shape).astype("float32") / 8
    return softmax(generator.normal(size=shape))


# Tokens 0, 1 and 2 want expert 0 first; token 2 is the surest, then token 0.
GATES = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.8, 0.2, 0.0]]], "float32")


def test_sums_and_zeros_of_gates_by_hand():
    # The two largest gates add up to 0.9, 0.9 and 1.0; token 1 here gets 0.95.
    gates = GATES.copy()
    gates[0, 1] = [0.5, 0.05, 0.45]
    plan = route(gates, 2, 2, "sum_gates")
    # First choices, in the order 2, 1, 0: all expert 0. Then second choices.
    assert plan.slot_tokens.tolist() == [[[2, 1], [2, 0], [1, -1]]]
    assert plan.token_slots.tolist() == [[[-1, 3], [1, 4], [0, 2]]]
    # V-MoE's code does so, too: the slot is used, and its output is combined with 0.
    gates = np.array([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]], "float32")
    _, d, c = route_densely(gates, gates, 2, 2)
    assert d[0, :, 1].tolist() == [[True, False], [False, True]]
    assert c[0, :, 1].tolist() == [[0, 0], [0, 0]]


def test_only_kept_gates_have_a_gradient():
    affinity, gates = random_gates(0, (2, 6, 4)), random_gates(1, (2, 6, 4))
    cotangent = np.random.default_rng(2).normal(size=(2, 6, 2)).astype("float32")
    weight = keras.ops.convert_to_tensor(cotangent)

    def weighted(affinity, gates):
        plan = token_choice(affinity, gates, 2, 2, "max_gate")
        return keras.ops.sum(plan.combine_weights * weight)

    of_affinity, of_gates = gradient(weighted, affinity, gates)
    assert_same(of_affinity, np.zeros_like(affinity))
    slots = route_densely(affinity, gates, 2, 2, "max_gate")[0].token_slots
    expected = np.zeros_like(gates)
    for g, s, k in np.argwhere(slots >= 0):
        expected[g, s, slots[g, s, k] // 2] = cotangent[g, s, k]
    assert_same(of_gates, expected)


routing_problems = st.tuples(
    st.sampled_from(SHAPES),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from(PRIORITIES),
)


@some
@given(
    routing_problems, st.sampled_from([0.0, 0.3, 1.0]), st.booleans(),
    st.sampled_from([0.0, 1e4, -1e4, np.inf]),
)  # fmt: skip
def test_agrees_with_the_obvious_algorithm(problem, masked_share, by_rank, value):
    (groups, tokens, experts, selected, capacity), seed, ties, priority = problem
    # Sums in another order may differ in the last bit; those of eighths are exact.
    ties = ties or priority == "sum_gates"
    affinity = random_gates(seed, (groups, tokens, experts), ties)
    gates = random_gates(seed + 1, affinity.shape)
    generator = np.random.default_rng(seed)
    mask = generator.random((groups, tokens)) >= masked_share
    if by_rank:
        priority = generator.integers(0, 3, (groups, tokens)).astype("float32")
    # Whatever masked tokens hold.
    affinity[~mask] = gates[~mask] = value
    arguments = affinity, gates, selected, capacity, priority, mask
    assert_same(route_densely(*arguments)[0], reference.token_choice(*arguments))


@pytest.mark.parametrize("selected", [1, 2])
@pytest.mark.parametrize("priority", PRIORITIES)
def test_minus_infinity_everywhere_but_once(priority, selected):
    affinity = np.full((1, 5, 4), -np.inf, "float32")
    best = [2, 0, 2, 3, 1]
    affinity[0, range(5), best] = [1, 2, 3, 4, 5]
    gates = np.where(np.isfinite(affinity), np.float32(1), np.float32(0))
    plan, _, _ = route_densely(affinity, gates, selected, 2, priority)
    assert (plan.token_slots[0, :, 0] // 2).tolist() == best
    assert np.all(np.isfinite(plan.combine_weights))
    assert_same(plan.combine_weights.sum(axis=-1), np.ones((1, 5)))
