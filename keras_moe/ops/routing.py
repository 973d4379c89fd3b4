"""The two records that travel beside the tokens: the plan and what happened.

Equation 2 of *Routers in Vision Mixture of Experts* writes an MoE layer with a dispatch
tensor D and a combine tensor C of shape (G, S, E, C). Only soft routing fills them
(`SoftPlan`). The sparse plans keep the entries that are not zero, by choice of the
token (`RoutingPlan`), by slot of the expert (`SlotPlan`) or, where no expert has a
capacity, by row (`RaggedPlan`). Experts without slots stand beside them
(`HeterogeneousPlan`).

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden,
R rows (G x S x K).
"""

import math
from typing import Any, NamedTuple

from keras import ops


class RoutingPlan(NamedTuple):
    """Token choice: the slots that each token's K choices got.

    Memory grows with S x K and with E x C, never with S x E x C. `dense_dispatch` and
    `dense_combine` give equation 2's tensors themselves.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, K). The flat slot `expert * C + position` of each
            choice of each token, -1 where the choice was dropped.
        combine_weights: float32 (G, S, K). The weight of each choice in the token's
            output, 0 where the choice was dropped.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(plan.slot_tokens).tolist()  # token 1 found expert 0 full
    [[[0], [2]]]
    >>> np.array(plan.token_slots).tolist()
    [[[0], [-1], [1]]]
    """

    slot_tokens: Any
    token_slots: Any
    combine_weights: Any


class SlotPlan(NamedTuple):
    """Expert choice: the tokens that each expert took, and their weights.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, E). The flat slot `expert * C + position` in which
            the expert serves the token, -1 where it does not.
        slot_weights: float32 (G, E, C). The weight of the slot in its token's output,
            0 where empty.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]], "float32")
    >>> plan = ops.expert_choice(gates, gates, capacity=1)
    >>> np.array(plan.token_slots).tolist()  # nobody took token 1
    [[[0, -1], [-1, -1], [-1, 1]]]
    """

    slot_tokens: Any
    token_slots: Any
    slot_weights: Any


class SoftPlan(NamedTuple):
    """Soft routing: equation 2's two tensors, full.

    Attributes:
        dispatch: float32 (G, S, E, C). Each slot's weights of the tokens; a slot's
            sum to 1 (to 0 if no token counts).
        combine: float32 (G, S, E, C). Each token's weights of the slots; a token's
            sum to 1 (to 0 if it is masked).

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> weights = np.full((1, 4, 2, 1), 0.25, "float32")
    >>> plan = ops.SoftPlan(dispatch=weights, combine=2 * weights)
    >>> tokens = np.array([[[0.0], [1.0], [2.0], [5.0]]], "float32")
    >>> np.array(ops.dispatch(tokens, plan))[0, :, 0, 0].tolist()  # the mean
    [2.0, 2.0]
    """

    dispatch: Any
    combine: Any


class RaggedPlan(NamedTuple):
    """Token choice without capacity: rows sorted by expert, as many as it takes.

    Attributes:
        row_tokens: int32 (R,). The token of each row as `group * S + token`, sorted
            by expert and then by place; rows of masked tokens come last, as -1.
        token_rows: int32 (G, S, K). The row of each choice, -1 where not routed.
        combine_weights: float32 (G, S, K). The weight of each choice in the token's
            output, 0 where not routed.
        token_experts: int32 (G, S, K). The expert of each choice, E where not routed.
        group_sizes: int32 (E,). How many rows each expert has.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]], "float32")
    >>> plan = ops.dropless_token_choice(gates, gates, num_selected_experts=1)
    >>> np.array(plan.row_tokens).tolist(), np.array(plan.group_sizes).tolist()
    ([0, 2, 1], [2, 1])
    """

    row_tokens: Any
    token_rows: Any
    combine_weights: Any
    token_experts: Any
    group_sizes: Any


class HeterogeneousPlan(NamedTuple):
    """Token choice among experts of which the last act on tokens in place.

    Attributes:
        plan: a `RoutingPlan` or `RaggedPlan` of the experts that have slots or rows;
            choices of the others count as dropped there.
        in_place: float32 (G, S, Z), Z the experts that act in place. 1 where the
            expert serves the token, else 0.
        in_place_weights: float32 (G, S, Z). The expert's weight in the token's output,
            0 where it does not serve the token.

    Reference:
        *MoE++*, section 3.1: zero-computation experts.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.7, 0.1, 0.2], [0.1, 0.3, 0.6]]], "float32")
    >>> plan = ops.token_choice(gates, gates, 1, capacity=1, in_place_experts=1)
    >>> np.array(plan.plan.slot_tokens).tolist()  # nobody chose expert 1
    [[[0], [-1]]]
    >>> np.array(plan.in_place).tolist()  # and token 1 the last
    [[[0.0], [1.0]]]
    """

    plan: Any
    in_place: Any
    in_place_weights: Any


class Routing(NamedTuple):
    """What a router did: float32 arrays for losses, residuals and analysis.

    A router returns it by group; the MoE layer returns it aligned with the
    tokens that it was given, so the leading axes are then (batch, tokens).

    Attributes:
        logits: (G, S, E). The router's logits, without noise. Soft routers have one
            for each slot: (G, S, E, C).
        noisy_logits: the logits that routed: with noise while training, and scaled
            where a router scales them; equal to `logits` otherwise; the same shape.
        affinity: (G, S, E). What allocated the slots: the gates, or a transport plan.
        gates: (G, S, E). The softmax of `noisy_logits` over experts, or over all slots
            and summed over an expert's.
        dispatched: (G, S, E). 1 where the expert served the token, else 0; for soft
            routers the token's share of the expert's slots, summed over these.
        combined: (G, S, E). The weight of the expert in the token's output.

    Example:

    >>> from keras_moe.ops import Routing
    >>> Routing._fields
    ('logits', 'noisy_logits', 'affinity', 'gates', 'dispatched', 'combined')
    """

    logits: Any
    noisy_logits: Any
    affinity: Any
    gates: Any
    dispatched: Any
    combined: Any


def served(plan: Any) -> tuple[Any, Any]:
    """Which expert served which token, and with what weight.

    Args:
        plan: a `RoutingPlan`, `SlotPlan`, `SoftPlan`, `RaggedPlan` or
            `HeterogeneousPlan`.

    Returns:
        `(dispatched, combined)`, both float32 (G, S, E): 1 where the expert served
        the token, and the expert's weight in the token's output.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(ops.served(plan)[0]).tolist()
    [[[1.0, 0.0], [0.0, 0.0]]]
    """
    if isinstance(plan, HeterogeneousPlan):
        dispatched, combined = served(plan.plan)
        return (
            ops.concatenate([dispatched, plan.in_place], axis=-1),
            ops.concatenate([combined, plan.in_place_weights], axis=-1),
        )
    if isinstance(plan, SoftPlan):
        return ops.sum(plan.dispatch, axis=-1), ops.sum(plan.combine, axis=-1)
    if isinstance(plan, SlotPlan):
        kept = plan.token_slots >= 0
        weights = _of_group(plan.slot_weights, ops.where(kept, plan.token_slots, 0))
        return ops.cast(kept, "float32"), ops.where(kept, weights, 0.0)
    if isinstance(plan, RaggedPlan):
        num_experts = ops.shape(plan.group_sizes)[0]
        chosen = plan.token_experts
    else:
        _, num_experts, capacity = ops.shape(plan.slot_tokens)
        # floor(-1 / C) = -1 matches no expert: dropped choices vanish by themselves.
        chosen = ops.floor_divide(plan.token_slots, capacity)
    return by_expert(chosen, plan.combine_weights, num_experts)


def by_expert(chosen: Any, weights: Any, num_experts: Any) -> tuple[Any, Any]:
    """Choices (G, S, K) by expert: 1 where it is chosen, and its weight there.

    Args:
        chosen: int32 (G, S, K); what is no expert's index is no choice.
        weights: float32 (G, S, K).
        num_experts: E.

    Returns:
        Two float32 (G, S, E), both 0 elsewhere.
    """
    experts = ops.arange(num_experts, dtype="int32")
    dispatched = combined = 0.0
    # An unrolled sum over K: one fused pass each, no (S, K, E) tensor.
    for k in range(chosen.shape[-1]):
        one_hot = ops.cast(chosen[..., k : k + 1] == experts, "float32")
        dispatched = dispatched + one_hot
        combined = combined + one_hot * weights[..., k : k + 1]
    return dispatched, combined


def check_slots(plan: Any) -> None:
    """Raises ValueError for a plan of which only a part has slots."""
    if isinstance(plan, HeterogeneousPlan):
        raise ValueError(
            "Expected a plan of experts with slots or rows, such as the "
            "HeterogeneousPlan's field `plan`; received: a HeterogeneousPlan"
        )


def _of_group(values, places):
    """`values[g].ravel()[places[g]]`: (G, E, C) at (G, S, E)."""
    shape = ops.shape(places)
    # Sizes in full: without groups there is none to infer.
    size, count = (math.prod(ops.shape(x)[1:]) for x in (values, places))
    flat = ops.reshape(values, (shape[0], size))
    found = ops.take_along_axis(flat, ops.reshape(places, (shape[0], count)), axis=1)
    return ops.reshape(found, shape)


def dense_dispatch(plan: Any) -> Any:
    """The dispatch tensor D of equation 2: which token fills which slot.

    For tests, for inspection and for the einsum dispatcher. Its size is
    G x S x E x C.

    Args:
        plan: a `RoutingPlan`, `SlotPlan` or `SoftPlan`.

    Returns:
        A boolean tensor (G, S, E, C); for a `SoftPlan` its float32 weights.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(ops.dense_dispatch(plan))[0, :, :, 0].tolist()
    [[True, False], [False, False]]
    """
    check_slots(plan)
    if isinstance(plan, SoftPlan):
        return plan.dispatch
    num_tokens = ops.shape(plan.token_slots)[1]
    tokens = ops.reshape(ops.arange(num_tokens, dtype="int32"), (1, -1, 1, 1))
    return ops.expand_dims(plan.slot_tokens, 1) == tokens


def dense_combine(plan: Any) -> Any:
    """The combine tensor C of equation 2: the weight of each slot in each output.

    Args:
        plan: a `RoutingPlan`, `SlotPlan` or `SoftPlan`.

    Returns:
        A float32 tensor (G, S, E, C).

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> round(float(np.array(ops.dense_combine(plan)).sum()), 3)
    0.9
    """
    check_slots(plan)
    if isinstance(plan, SoftPlan):
        return plan.combine
    if isinstance(plan, SlotPlan):
        one_hot = ops.cast(dense_dispatch(plan), "float32")
        return one_hot * plan.slot_weights[:, None]
    _, num_experts, capacity = ops.shape(plan.slot_tokens)
    slots = ops.arange(num_experts * capacity, dtype="int32")
    dense = 0.0
    for k in range(plan.token_slots.shape[-1]):
        one_hot = ops.cast(plan.token_slots[..., k : k + 1] == slots, "float32")
        dense = dense + one_hot * plan.combine_weights[..., k : k + 1]
    return ops.reshape(dense, ops.shape(dense)[:2] + (num_experts, capacity))
