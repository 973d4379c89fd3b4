"""Token choice: every token chooses its K experts, first come, first served.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, R rows.
"""

import math
from typing import NamedTuple

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Size, Tensor
from keras_moe.ops import _primitives, plans

NORMALIZATIONS = (None, "before", "after")
PRIORITIES = ("first_come", "max_gate", "sum_gates")
INT32_MAX = 2**31 - 1
# Instead of a slot: the choice is served by an expert that has none.
_IN_PLACE = -2


def token_choice(
    affinity: Tensor,
    gates: Tensor,
    num_selected_experts: int,
    capacity: Size,
    priority: str | Tensor = "first_come",
    mask: Tensor | None = None,
    *,
    normalize_gates: str | None = None,
    in_place_experts: int = 0,
    in_place_capacity: Size | None = None,
    available: Tensor | None = None,
    choices: tuple[Tensor, Tensor] | None = None,
) -> plans.RoutingPlan | plans.HeterogeneousPlan:
    """Allocates slots to each token's K experts of largest affinity.

    Algorithm 1 of *Routers in Vision Mixture of Experts*: all first choices are served
    before any second choice, and so on. A choice whose expert is full is dropped; the
    token's other choices stand. Ties go to the lowest expert.

    Args:
        affinity: float32 (G, S, E), by which tokens choose experts; the gates in V-MoE.
        gates: float32 (G, S, E), the combine weights. Only these have a gradient.
        num_selected_experts: K, experts per token.
        capacity: C, slots per expert and group.
        priority: order in which tokens are served: `"first_come"`; `"max_gate"` by
            decreasing largest affinity (batch priority routing of V-MoE); `"sum_gates"`
            by decreasing sum of the K largest (*LIMoE*, appendix E.1); or numbers (G,
            S), the smallest first. Ties keep their order.
        mask: boolean (G, S), False for tokens (padding) that are not routed.
        normalize_gates: `"before"` divides the gates by the sum of the token's K,
            `"after"` by the sum of those that got a slot (*CLIP-UP*, appendix B.3), and
            None leaves them as they are.
        in_place_experts: Z, number of last experts that act in place, without slots.
        in_place_capacity: tokens that each of these serves in a group; None for all.
        available: boolean (E,), False for experts of which choices are dropped.
        choices: experts, int32 (G, S, K), and their gates, if they are known.

    Returns: A `RoutingPlan`; with `in_place_experts` a `HeterogeneousPlan`.

    Example:

    >>> from keras_moe.ops import token_choice
    >>> gates = np.array([[[0.6, 0.4], [0.9, 0.1]]], "float32")
    >>> plan = token_choice(gates, gates, 1, capacity=1, priority="max_gate")
    >>> np.array(plan.slot_tokens).tolist()  # token 1 goes first
    [[[1], [-1]]]
    """
    affinity = ops.convert_to_tensor(affinity)
    gates = ops.convert_to_tensor(gates)
    _checks.check_affinity(affinity, gates, capacity, mask)
    _check(affinity, num_selected_experts, normalize_gates, in_place_experts)
    num_experts = affinity.shape[-1]
    num_slotted = num_experts - in_place_experts

    experts, weights = choices or top_experts(affinity, gates, num_selected_experts)
    routed = _routed(experts, mask, available)
    if routed is not None:
        # Others queue for an expert after the last, without slots.
        experts = ops.where(routed, experts, num_experts)

    rank = _rank(priority, affinity, num_selected_experts)
    slot_tokens, position = _fill_slots(
        experts, rank, num_experts + 1, num_slotted, capacity
    )
    kept = (position < capacity) & (experts < num_slotted)
    token_slots = ops.where(kept, experts * capacity + position, -1)
    if in_place_experts:
        kept = (experts >= num_slotted) & (experts < num_experts)
        if in_place_capacity is not None:
            kept = kept & (position < in_place_capacity)
        token_slots = ops.where(kept, _IN_PLACE, token_slots)
    if not in_place_experts:
        combine_weights = _weights(weights, token_slots >= 0, normalize_gates)
        return plans.RoutingPlan(slot_tokens, token_slots, combine_weights)
    weights = _weights(weights, token_slots != -1, normalize_gates)
    in_place = token_slots == _IN_PLACE
    plan = plans.RoutingPlan(
        slot_tokens, ops.maximum(token_slots, -1), ops.where(in_place, 0.0, weights)
    )
    chosen = ops.where(in_place, experts - num_slotted, -1)
    return plans.HeterogeneousPlan(
        plan, *plans.one_hot_choices(chosen, weights, in_place_experts)
    )


def _fill_slots(experts, rank, *sizes):
    """The form of `fill_slots` that is fast on the device."""
    if keras.backend.backend() != "jax":
        return fill_slots(experts, rank, *sizes)
    from keras_moe.ops.kernels import _tpus_jax

    return _tpus_jax.fill_slots(experts, rank, *sizes, other=fill_slots)


def fill_slots(
    experts: Tensor,
    rank: Tensor | None,
    num_experts: Size,
    num_slotted: Size,
    capacity: Size,
) -> tuple[Tensor, Tensor]:
    """The token in each slot (G, E, C), and each choice's place in its queue."""
    # Queues go by choice, then by `rank` (G, S), then by token.
    order = None if rank is None else ops.cast(ops.argsort(rank, axis=-1), "int32")
    queues = _sorted_queues(experts, order, num_experts)
    slot_tokens = _tokens_of_slots(queues, num_slotted, capacity)
    # From tokens to slots: each key writes its place at its token and choice.
    _, num_tokens, num_choices = queues.shape
    queue = ops.floor_divide(queues.keys, num_choices * num_tokens)
    position = ops.arange(ops.shape(queues.keys)[0], dtype="int32")
    position = position - _primitives.take(queues.starts, queue)
    return slot_tokens, _scatter_to_choices(queues, queue, position)


class _Queues(NamedTuple):
    """The choices of all groups, sorted by group, expert, choice and priority."""

    # int32 (G x S x K): ((group * queues + expert) * K + choice) * S + position, which
    # is that of the token in the `order` (G, S) of its group.
    keys: Tensor
    starts: Tensor  # int32 (G x queues), the first key of each queue
    order: Tensor | None
    num_queues: Tensor  # one for each expert, and one for what is not routed
    shape: tuple  # (G, S, K)


def _sorted_queues(experts, order, num_queues):
    """One sort for all queues: a position is a rank less that of its queue's start."""
    num_groups, num_tokens, num_choices = shape = ops.shape(experts)
    if order is not None:
        experts = _primitives.take_along_axis(
            experts, ops.expand_dims(order, -1), axis=1
        )
    queue_size = num_choices * num_tokens
    _check_range(num_groups, num_queues, queue_size)
    group = ops.reshape(ops.arange(num_groups, dtype="int32"), (-1, 1, 1))
    choice = ops.arange(num_choices, dtype="int32")
    position = ops.reshape(ops.arange(num_tokens, dtype="int32"), (1, -1, 1))
    queue = group * num_queues + experts
    keys = queue * queue_size + choice * num_tokens + position
    keys = ops.sort(ops.reshape(keys, (-1,)))
    first = ops.arange(num_groups * num_queues, dtype="int32") * queue_size
    starts = _primitives.searchsorted(keys, first)
    return _Queues(keys, starts, order, num_queues, shape)


def _tokens_of_slots(queues, num_experts, capacity):
    """The c-th token of each expert's queue, (G, E, C), -1 after its end."""
    num_groups, num_tokens, _ = queues.shape
    bounds = ops.reshape(queues.starts, (num_groups, queues.num_queues))
    bounds = bounds[:, : num_experts + 1]
    rank = bounds[:, :-1, None] + ops.arange(capacity, dtype="int32")
    filled = rank < bounds[:, 1:, None]
    token = _primitives.take(queues.keys, ops.where(filled, rank, 0)) % num_tokens
    if queues.order is not None:
        # order[g, token[g, e, c]]
        flat = ops.reshape(token, (num_groups, num_experts * capacity))
        flat = _primitives.take_along_axis(queues.order, flat, axis=1)
        token = ops.reshape(flat, ops.shape(token))
    return ops.where(filled, token, -1)


def _scatter_to_choices(queues, queue, values):
    """Values of the sorted choices as (G, S, K); `queue` is that of each key."""
    _, num_tokens, num_choices = queues.shape
    group = ops.floor_divide(queue, queues.num_queues)
    token = queues.keys % num_tokens
    if queues.order is not None:
        token = _primitives.take(
            ops.reshape(queues.order, (-1,)), group * num_tokens + token
        )
    choice = ops.floor_divide(queues.keys, num_tokens) % num_choices
    target = (group * num_tokens + token) * num_choices + choice
    values = _primitives.scatter(ops.zeros_like(values), target, values)
    return ops.reshape(values, queues.shape)


def dropless_token_choice(
    affinity: Tensor,
    gates: Tensor,
    num_selected_experts: int,
    mask: Tensor | None = None,
    *,
    normalize_gates: str | None = None,
    in_place_experts: int = 0,
    available: Tensor | None = None,
    choices: tuple[Tensor, Tensor] | None = None,
) -> plans.RaggedPlan | plans.HeterogeneousPlan:
    """Gives each token its K experts of largest affinity; no expert is ever full.

    Outputs are those of `token_choice` with room for every choice, but memory grows
    with the tokens and not with the load of the busiest expert.

    Args:
        affinity: float32 (G, S, E), by which tokens choose; ties take the lowest.
        gates: float32 (G, S, E), the combine weights. Only these have a gradient.
        num_selected_experts: K, experts per token.
        mask: boolean (G, S), False for tokens (padding) that are not routed.
        normalize_gates: see `token_choice`; only unavailable experts drop choices.
        in_place_experts: Z, number of last experts that act in place, without rows.
        available: boolean (E,), False for experts of which choices are dropped.
        choices: experts, int32 (G, S, K), and their gates, if they are known.

    Returns: A `RaggedPlan`; with `in_place_experts` a `HeterogeneousPlan`.

    Reference: *Routers in Vision Mixture of Experts*, equation 1.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.6, 0.4], [0.9, 0.1]]], "float32")
    >>> plan = ops.dropless_token_choice(gates, gates, num_selected_experts=1)
    >>> np.array(plan.group_sizes).tolist()  # expert 0 serves both
    [2, 0]
    """
    affinity = ops.convert_to_tensor(affinity)
    gates = ops.convert_to_tensor(gates)
    _checks.check_affinity(affinity, gates, None, mask)
    _check(affinity, num_selected_experts, normalize_gates, in_place_experts)
    num_experts = ops.shape(affinity)[2] - in_place_experts

    experts, weights = choices or top_experts(affinity, gates, num_selected_experts)
    routed = _routed(experts, mask, available)
    weights = _weights(weights, routed, normalize_gates)
    if in_place_experts:
        position = experts - num_experts
        position = position if routed is None else ops.where(routed, position, -1)
        in_place = plans.one_hot_choices(position, weights, in_place_experts)
        # Choices of these experts have no rows, like those of masked tokens.
        has_row = experts < num_experts
        routed = has_row if routed is None else ops.logical_and(has_row, routed)
        weights = ops.where(routed, weights, 0.0)
    if routed is not None:
        experts = ops.where(routed, experts, num_experts)
    row_tokens, token_rows, group_sizes = rows_by_expert(experts, num_experts)
    plan = plans.RaggedPlan(row_tokens, token_rows, weights, experts, group_sizes)
    return plans.HeterogeneousPlan(plan, *in_place) if in_place_experts else plan


def rows_by_expert(experts: Tensor, num_experts: Size) -> tuple[Tensor, Tensor, Tensor]:
    """`row_tokens`, `token_rows` and `group_sizes` of choices (..., K), E for none."""
    num_choices = experts.shape[-1]
    num_rows = math.prod(ops.shape(experts))
    _check_range(1, num_experts + 1, num_rows)
    # One integer holds expert and choice: sorted, the choices stand by expert.
    row = ops.arange(num_rows, dtype="int32")
    keys = ops.sort(ops.reshape(experts, (-1,)) * num_rows + row)
    # Counted, since `searchsorted` needs a known number of rows, which an exported JAX
    # model does not have.
    first = ops.arange(num_experts + 1, dtype="int32") * num_rows
    bounds = ops.sum(ops.cast(keys[None] < first[:, None], "int32"), axis=1)
    choice = keys % num_rows
    row_tokens = ops.floor_divide(choice, num_choices)
    row_tokens = ops.where(row < bounds[-1], row_tokens, -1)
    token_rows = ops.reshape(_invert(choice), ops.shape(experts))
    token_rows = ops.where(experts < num_experts, token_rows, -1)
    return row_tokens, token_rows, bounds[1:] - bounds[:-1]


def _invert(permutation):
    """The form of `invert` that is fast on the device."""
    if keras.backend.backend() != "jax":
        return invert(permutation)
    from keras_moe.ops.kernels import _tpus_jax

    return _tpus_jax.invert(permutation, other=invert)


def invert(permutation: Tensor) -> Tensor:
    """The index (R,) of each number from 0 on in a permutation of them, int32."""
    index = ops.arange(ops.shape(permutation)[0], dtype="int32")
    return _primitives.scatter(ops.zeros_like(index), permutation, index)


def _check(affinity, num_selected_experts, normalize_gates, in_place_experts):
    num_experts = affinity.shape[-1]
    _checks.check_selected(num_selected_experts, num_experts)
    _checks.check_one_of("normalize_gates", normalize_gates, NORMALIZATIONS)
    _checks.check_integer("in_place_experts", in_place_experts, 0, num_experts - 1)


def _routed(experts, mask, available):
    """The choices that are routed, boolean (G, S, K or 1); None for all."""
    routed = None if mask is None else ops.expand_dims(ops.cast(mask, "bool"), -1)
    if available is None:
        return routed
    available = ops.convert_to_tensor(available, "bool")
    is_available = ops.take(available, experts, axis=0)
    return is_available if routed is None else ops.logical_and(is_available, routed)


def _weights(gates, kept, normalize_gates):
    """The combine weights of the choices (G, S, K)."""
    weights = gates if kept is None else ops.where(kept, gates, 0.0)
    if normalize_gates is None:
        return weights
    total = ops.sum(
        gates if normalize_gates == "before" else weights, axis=-1, keepdims=True
    )
    # Scaled by a constant first: the gradient divides by the square of the sum, which
    # underflows float32 for a small one. Below this the sum counts as zero.
    is_sum = total > 1e-37
    scale = ops.stop_gradient(ops.where(is_sum, total, 1.0))
    # The sum over its constant: 1, with the gradient of the sum.
    rest = ops.where(is_sum, total / scale, 1.0)
    return ops.where(is_sum, weights / scale / rest, 0.0)


def top_experts(affinity, gates, num_selected_experts):
    """The K experts of largest affinity, ties to the lowest, and gates, (G, S, K)."""
    # K passes of argmax, since `top_k` orders ties differently on each backend.
    index = ops.arange(ops.shape(affinity)[-1], dtype="int32")
    # A taken expert gets -inf, and no other entry may have that.
    rest = ops.maximum(ops.stop_gradient(affinity), -3e38)
    experts, weights = [], []
    for k in range(num_selected_experts):
        expert = _primitives.argmax(rest)
        taken = expert == index
        experts.append(expert)
        weights.append(ops.sum(ops.where(taken, gates, 0.0), axis=-1, keepdims=True))
        if k + 1 < num_selected_experts:
            rest = ops.where(taken, -float("inf"), rest)
    return ops.concatenate(experts, axis=-1), ops.concatenate(weights, axis=-1)


def selected_experts(affinity: Tensor, num_selected_experts: int) -> Tensor:
    """1 for the K experts of largest affinity (G, S, E), else 0, as float32."""
    affinity = ops.convert_to_tensor(affinity)
    _checks.check_selected(num_selected_experts, affinity.shape[-1])
    experts, weights = top_experts(affinity, affinity, num_selected_experts)
    return plans.one_hot_choices(experts, weights, ops.shape(affinity)[-1])[0]


def _rank(priority, affinity, num_selected_experts):
    """Numbers (G, S), the smallest of which is served first; None as they stand."""
    if priority is not None and not isinstance(priority, str):
        rank = ops.convert_to_tensor(priority)
        if not _checks.fits_shape(rank.shape, affinity.shape[:2]):
            expected = f"numbers of shape {tuple(affinity.shape[:2])} as priority"
            raise _checks.unfit(expected, f"priority.shape={tuple(rank.shape)}")
    elif _checks.check_one_of("priority", priority, PRIORITIES) == "first_come":
        return None
    # The affinity allocates, and the gates only weigh the outputs.
    elif priority == "max_gate":
        rank = -_primitives.max_along(affinity, axis=-1)
    else:
        _, chosen = top_experts(affinity, affinity, num_selected_experts)
        rank = -ops.sum(chosen, axis=-1)
    return ops.stop_gradient(rank)


def _check_range(num_groups, num_queues, queue_size):
    largest = num_groups * num_queues * queue_size
    # Unknown while TensorFlow traces or a JAX model is exported.
    if isinstance(largest, int) and largest > INT32_MAX:
        raise ValueError(
            "Expected tokens x (experts + 1) x selected experts below 2**31, the "
            f"range of the sorting key; received: {largest}. Use fewer tokens per call."
        )
