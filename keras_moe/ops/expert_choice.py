"""Expert choice: every expert takes the C tokens of largest affinity.

Axes: G groups, S group_size, E experts, C capacity.
"""

from keras import ops

from keras_moe._checks import check_affinity, check_one_of, unfit
from keras_moe._types import Size, Tensor
from keras_moe.ops._primitives import scatter, take, top_values
from keras_moe.ops.plans import SlotPlan

NORMALIZATIONS = (None, "after")


def expert_choice(
    affinity: Tensor,
    gates: Tensor,
    capacity: Size,
    mask: Tensor | None = None,
    *,
    normalize_gates: str | None = None,
    filled_slots: Tensor | None = None,
) -> SlotPlan:
    """Fills each expert's slots with the C tokens of largest affinity, best first.

    A token may be served by several experts or by none. Ties go to the lowest token.

    Args:
        affinity: float32 (G, S, E), by which experts take tokens; -inf forbids a pair.
        gates: float32 (G, S, E), the combine weights. Only these have a gradient.
        capacity: C, slots per expert and group; at most S.
        mask: boolean (G, S), False for tokens (padding) that no expert takes.
        normalize_gates: `"after"` divides a token's gates by their sum over the experts
            that took it (*CLIP-UP*, appendix B.3); None leaves them as they are.
        filled_slots: integers (G,), slots that an expert may fill in a group, or None.

    Reference: *Routers in Vision Mixture of Experts*, Algorithm 2.

    Example:

    >>> from keras_moe.ops import expert_choice
    >>> gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]], "float32")
    >>> plan = expert_choice(gates, gates, capacity=2)
    >>> np.array(plan.slot_tokens).tolist()  # token 0 has both experts
    [[[1, 0], [2, 0]]]
    """
    affinity = ops.convert_to_tensor(affinity)
    gates = ops.convert_to_tensor(gates)
    check_affinity(affinity, gates, capacity, mask)
    check_one_of("normalize_gates", normalize_gates, NORMALIZATIONS)
    num_groups, num_tokens, num_experts = ops.shape(affinity)
    is_static = isinstance(capacity, int) and isinstance(num_tokens, int)
    if is_static and capacity > num_tokens:
        expected = f"a capacity of at most {num_tokens}, the tokens of a group"
        raise unfit(expected, capacity=capacity)
    affinity = ops.stop_gradient(affinity)
    if mask is not None:
        allowed = ops.expand_dims(ops.cast(mask, "bool"), -1)
        affinity = ops.where(allowed, affinity, -float("inf"))
    best, tokens = top_values(ops.transpose(affinity, (0, 2, 1)), capacity)
    filled = best > -float("inf")
    if filled_slots is not None:
        position = ops.arange(capacity, dtype="int32")
        filled = filled & (position < ops.reshape(filled_slots, (-1, 1, 1)))
    slot_tokens = ops.where(filled, tokens, -1)

    # Each filled slot writes its number at its token and expert.
    group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
    expert = ops.reshape(ops.arange(num_experts, dtype="int32"), (1, -1, 1))
    pair = (group * num_tokens + tokens) * num_experts + expert
    slot = expert * capacity + ops.arange(capacity, dtype="int32")
    slot = ops.where(filled, slot, -1)
    token_slots = scatter(
        ops.full((num_groups * num_tokens * num_experts,), -1, dtype="int32"),
        ops.reshape(pair, (-1,)),
        ops.reshape(ops.broadcast_to(slot, ops.shape(pair)), (-1,)),
    )
    token_slots = ops.reshape(token_slots, (num_groups, num_tokens, num_experts))
    if normalize_gates == "after":
        gates = ops.where(token_slots >= 0, gates, 0.0)
        total = ops.sum(gates, axis=-1, keepdims=True)
        gates = ops.where(total > 0, gates / ops.where(total > 0, total, 1.0), 0.0)
    weights = take(ops.reshape(gates, (-1,)), pair)
    return SlotPlan(slot_tokens, token_slots, ops.where(filled, weights, 0.0))
