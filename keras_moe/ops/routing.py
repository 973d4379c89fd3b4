"""The two records that travel beside the tokens: the plan and what happened.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any, NamedTuple

from keras import ops


class RoutingPlan(NamedTuple):
    """What an MoE layer executes: equation 2's dispatch and combine, in index form.

    Equation 2 of *Routers in Vision Mixture of Experts* writes an MoE layer with a
    dispatch tensor D and a combine tensor C of shape (G, S, E, C). Nearly all of
    their entries are zero, so the plan keeps the non-zero ones: memory grows
    with S x K and with E x C, never with S x E x C. `dense_dispatch` and
    `dense_combine` give the tensors themselves.

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


class Routing(NamedTuple):
    """What a router did: float32 arrays for losses, residuals and analysis.

    A router returns it by group; the MoE layer returns it aligned with the
    tokens that it was given, so the leading axes are then (batch, tokens).

    Attributes:
        logits: (G, S, E). The router's logits, without noise.
        noisy_logits: (G, S, E). The logits that routed: with noise while training,
            equal to `logits` otherwise.
        gates: (G, S, E). The softmax of `noisy_logits` over experts.
        dispatched: (G, S, E). 1 where the expert served the token, else 0.
        combined: (G, S, E). The weight of the expert in the token's output.

    Example:

    >>> from keras_moe.ops import Routing
    >>> Routing._fields
    ('logits', 'noisy_logits', 'gates', 'dispatched', 'combined')
    """

    logits: Any
    noisy_logits: Any
    gates: Any
    dispatched: Any
    combined: Any


def served(plan: RoutingPlan) -> tuple[Any, Any]:
    """Which expert served which token, and with what weight.

    Args:
        plan: the `RoutingPlan`.

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
    _, num_experts, capacity = ops.shape(plan.slot_tokens)
    experts = ops.arange(num_experts, dtype="int32")
    # floor(-1 / C) = -1 matches no expert, so dropped choices vanish by themselves.
    chosen = ops.floor_divide(plan.token_slots, capacity)
    dispatched = combined = 0.0
    # An unrolled sum over K: one fused pass each, no (S, K, E) tensor.
    for k in range(plan.token_slots.shape[-1]):
        one_hot = ops.cast(chosen[..., k : k + 1] == experts, "float32")
        dispatched = dispatched + one_hot
        combined = combined + one_hot * plan.combine_weights[..., k : k + 1]
    return dispatched, combined


def dense_dispatch(plan: RoutingPlan) -> Any:
    """The dispatch tensor D of equation 2: which token fills which slot.

    For tests, for inspection and for the einsum dispatcher. Its size is
    G x S x E x C.

    Args:
        plan: the `RoutingPlan`.

    Returns:
        A boolean tensor (G, S, E, C).

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.8, 0.2]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(ops.dense_dispatch(plan))[0, :, :, 0].tolist()
    [[True, False], [False, False]]
    """
    num_tokens = ops.shape(plan.token_slots)[1]
    tokens = ops.reshape(ops.arange(num_tokens, dtype="int32"), (1, -1, 1, 1))
    return ops.expand_dims(plan.slot_tokens, 1) == tokens


def dense_combine(plan: RoutingPlan) -> Any:
    """The combine tensor C of equation 2: the weight of each slot in each output.

    Args:
        plan: the `RoutingPlan`.

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
    _, num_experts, capacity = ops.shape(plan.slot_tokens)
    slots = ops.arange(num_experts * capacity, dtype="int32")
    dense = 0.0
    for k in range(plan.token_slots.shape[-1]):
        one_hot = ops.cast(plan.token_slots[..., k : k + 1] == slots, "float32")
        dense = dense + one_hot * plan.combine_weights[..., k : k + 1]
    return ops.reshape(dense, ops.shape(dense)[:2] + (num_experts, capacity))
