"""The queues of tokens before the experts, and what a capacity would cut off.

Axes: B batch, N tokens, G groups, S group_size, E experts, K selected experts.
"""

from typing import Any

import numpy as np

from keras_moe.checks import check_integer
from keras_moe.ops import expert_capacity, expert_choice, token_choice


def expert_queues(
    affinity: Any,
    num_selected_experts: int | None = None,
    priority: Any = "first_come",
    examples_per_group: int = 1,
    mask: Any = None,
) -> np.ndarray:
    """The place of each token in the queue before each expert.

    A place does not depend on the capacity: an expert with room for C tokens serves
    places 0 to C - 1, so that one call shows the drops at every capacity.

    Args:
        affinity: (B, N, E), `Routing.affinity` of a record.
        num_selected_experts: K where tokens choose their experts; None where experts
            choose their tokens, which then all queue before each expert.
        priority: order of token choice, argument of `keras_moe.ops.token_choice`; or
            numbers (B, N), of which the smallest goes first.
        examples_per_group: number of successive images whose tokens compete, a divisor
            of B.
        mask: boolean (B, N), False for tokens that are not routed, or None.

    Returns:
        int32 (B, N, E): 0 for the first in the queue of the expert, and -1 for tokens
        that are not in it.

    Raises:
        ValueError: if shapes do not fit, or an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, Algorithms 1 and 2; *LIMoE*,
        appendix F.5.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import expert_queues
    >>> affinity = np.array([[[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]], "float32")
    >>> expert_queues(affinity, 1, priority="max_gate").tolist()
    [[[1, -1], [0, -1], [-1, 0]]]
    """
    affinity = np.asarray(affinity, "float32")
    if affinity.ndim != 3:
        raise ValueError(
            "Expected an affinity of shape (batch, tokens, experts); "
            f"received: shape={affinity.shape}"
        )
    batch, length, num_experts = affinity.shape
    if check_integer("examples_per_group", examples_per_group) > batch or (
        batch % examples_per_group
    ):
        raise ValueError(
            f"Expected examples_per_group to divide the batch of {batch}; "
            f"received: examples_per_group={examples_per_group}"
        )
    size = examples_per_group * length
    grouped = affinity.reshape(-1, size, num_experts)
    mask = None if mask is None else np.asarray(mask, bool).reshape(-1, size)
    # With room for everybody, a slot is a place in the queue.
    if num_selected_experts is None:
        slots = np.array(expert_choice(grouped, grouped, size, mask).token_slots)
        places = np.where(slots < 0, -1, slots % size)
    else:
        if not isinstance(priority, str):
            priority = np.asarray(priority, "float32").reshape(-1, size)
        plan = token_choice(
            grouped, grouped, num_selected_experts, size, priority, mask
        )
        slots = np.array(plan.token_slots)
        places = np.full((*grouped.shape[:2], num_experts + 1), -1, "int32")
        # Choices of masked tokens go to a column behind the last expert's.
        experts = np.where(slots < 0, num_experts, slots // size)
        np.put_along_axis(places, experts, np.where(slots < 0, -1, slots % size), -1)
        places = places[..., :-1]
    return places.reshape(affinity.shape).astype("int32")


def served_at(places: Any, capacity: Any) -> np.ndarray:
    """The tokens that each expert serves at a capacity."""
    return (places >= 0) & (places < np.asarray(capacity))


def dropped_at_capacities(
    routing: Any,
    capacity_factors: Any,
    num_selected_experts: int | None = None,
    priority: Any = "first_come",
    examples_per_group: int = 1,
    mask: Any = None,
) -> np.ndarray:
    """The tokens that no expert would serve at some capacity factors.

    The plan is made anew from the affinity of a record, which a model at inference
    gives without noise and mostly without any capacity.

    Args:
        routing: `Routing` of arrays (B, N, E).
        capacity_factors: F numbers c; an expert serves c S K / E tokens of a group,
            rounded up.
        num_selected_experts: K where tokens choose, or None where experts do.
        priority: argument of `expert_queues`.
        examples_per_group: argument of `expert_queues`.
        mask: boolean (B, N), False for tokens that are not routed, which are not
            dropped, either; or None.

    Returns:
        Boolean (F, B, N), True for dropped tokens.

    Raises:
        ValueError: if shapes do not fit, or an argument is out of range.

    Reference:
        *CLIP-UP*, Figure 7.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import dropped_at_capacities
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]], "float32")
    >>> dropped_at_capacities(Routing(*[gates] * 6), (0.5, 1.0), 1).tolist()
    [[[False, True, True, False]], [[False, False, True, False]]]
    """
    places = expert_queues(
        routing.affinity, num_selected_experts, priority, examples_per_group, mask
    )
    _, length, num_experts = places.shape
    capacities = [
        expert_capacity(
            examples_per_group * length, num_experts, factor, num_selected_experts or 1
        )
        for factor in capacity_factors
    ]
    dropped = [~served_at(places, capacity).any(axis=-1) for capacity in capacities]
    dropped = np.array(dropped, bool).reshape(-1, *places.shape[:2])
    return dropped if mask is None else dropped & np.asarray(mask, bool)
