"""Moving tokens to slots and expert outputs back to tokens.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden,
R rows.
"""

from typing import Any

from keras import ops

from keras_moe.ops.by_group import by_group
from keras_moe.ops.empty import take
from keras_moe.ops.routing import (
    RaggedPlan,
    SlotPlan,
    SoftPlan,
    check_slots,
    dense_combine,
    dense_dispatch,
)
from keras_moe.ops.row_moves import take_rows, weighted_sum_of_rows


def _tokens_of(plan, tokens):
    """`tokens` as a tensor, if its shape is that of the plan's tokens."""
    check_slots(plan)
    tokens = ops.convert_to_tensor(tokens)
    expected = tuple(_by_token(plan).shape[:2])
    if len(tokens.shape) != 3 or not _fits(tokens.shape[:2], expected):
        raise ValueError(
            f"Expected tokens of shape (groups, tokens, dim) with {expected} first, as "
            f"in the plan; received: tokens.shape={tuple(tokens.shape)}"
        )
    return tokens


def _by_token(plan):
    """A field of the plan that starts with (G, S)."""
    if isinstance(plan, SoftPlan):
        return plan.dispatch
    return plan.token_rows if isinstance(plan, RaggedPlan) else plan.token_slots


def _outputs_of(plan, outputs):
    """`outputs` as a tensor, if its shape is that of the plan's slots or rows."""
    check_slots(plan)
    outputs = ops.convert_to_tensor(outputs)
    if isinstance(plan, RaggedPlan):
        expected = tuple(plan.row_tokens.shape)
        if len(outputs.shape) != 2 or not _fits(outputs.shape[:1], expected):
            raise ValueError(
                f"Expected outputs of shape (rows, dim) with {expected} first, as in "
                f"the plan; received: outputs.shape={tuple(outputs.shape)}"
            )
        return outputs
    if isinstance(plan, SoftPlan):
        groups, _, *slots = plan.dispatch.shape
        expected = (groups, *slots)
    else:
        expected = tuple(plan.slot_tokens.shape)
    if len(outputs.shape) != 4 or not _fits(outputs.shape[:3], expected):
        raise ValueError(
            "Expected outputs of shape (groups, experts, capacity, dim) with "
            f"{expected} first, as in the plan; "
            f"received: outputs.shape={tuple(outputs.shape)}"
        )
    return outputs


def _fits(shape, expected):
    # Sizes that TensorFlow does not know while it traces fit any other.
    return all(a == b or None in (a, b) for a, b in zip(shape, expected))


def dispatch(tokens: Any, plan: Any) -> Any:
    """Fills the slots from the tokens: `X^T D` of equation 2.

    Sparse plans gather each slot's token; a `SoftPlan` mixes tokens, in their dtype.

    Args:
        tokens: (G, S, D), any float dtype.
        plan: a `RoutingPlan`, `SlotPlan`, `SoftPlan` or `RaggedPlan`.

    Returns:
        The experts' inputs (G, E, C, D) in the dtype of `tokens`, or rows (R, D)
        sorted by expert for a `RaggedPlan`; empty slots and rows hold zeros.

    Raises:
        ValueError: if the shape of `tokens` is not that of the plan.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.2, 0.8]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=2)
    >>> tokens = np.array([[[1.0], [2.0]]], "float32")
    >>> np.array(ops.dispatch(tokens, plan))[0, :, :, 0].tolist()
    [[1.0, 0.0], [2.0, 0.0]]
    """
    tokens = _tokens_of(plan, tokens)
    if isinstance(plan, SoftPlan):
        weights = ops.cast(plan.dispatch, tokens.dtype)
        return ops.einsum("gsd,gsec->gecd", tokens, weights)
    if isinstance(plan, RaggedPlan):
        return _gather(tokens, plan)
    return by_group(lambda x, *plan_: _gather(x, type(plan)(*plan_)), tokens, *plan)


def _gather(tokens, plan):
    """`dispatch` by index."""
    num_groups, num_tokens, dim = ops.shape(tokens)
    if isinstance(plan, RaggedPlan):
        rows = plan.row_tokens
        filled = rows >= 0
    else:
        first = ops.arange(num_groups, dtype="int32") * num_tokens
        rows = plan.slot_tokens + first[:, None, None]
        filled = plan.slot_tokens >= 0
    flat = ops.reshape(tokens, (-1, dim))
    rows = ops.where(filled, rows, 0)
    if isinstance(plan, SlotPlan):
        # A token may be in the slots of all experts: the way back is a scatter.
        inputs = take(flat, rows)
    else:
        inputs = take_rows(flat, ops.reshape(rows, (-1,)), _choices(plan))
        inputs = ops.reshape(inputs, (*ops.shape(rows), dim))
    return ops.where(filled[..., None], inputs, ops.zeros_like(inputs))


def _choices(plan):
    """The flat slot or row of each token's K choices, (G x S, K), -1 where dropped."""
    if isinstance(plan, RaggedPlan):
        return ops.reshape(plan.token_rows, (-1, plan.token_rows.shape[-1]))
    num_groups, num_experts, capacity = ops.shape(plan.slot_tokens)
    first = ops.arange(num_groups, dtype="int32") * (num_experts * capacity)
    slots = plan.token_slots
    slots = ops.where(slots >= 0, slots + first[:, None, None], -1)
    return ops.reshape(slots, (-1, slots.shape[-1]))


def _owners(plan):
    """The flat token in each slot or row, (R,), -1 where empty."""
    if isinstance(plan, RaggedPlan):
        return plan.row_tokens
    num_groups, num_tokens, _ = ops.shape(plan.token_slots)
    first = ops.arange(num_groups, dtype="int32") * num_tokens
    tokens = plan.slot_tokens
    tokens = ops.where(tokens >= 0, tokens + first[:, None, None], -1)
    return ops.reshape(tokens, (-1,))


def combine(outputs: Any, plan: Any) -> Any:
    """Sums each token's expert outputs by their combine weights.

    Args:
        outputs: the experts' outputs (G, E, C, D), or (R, D) for a `RaggedPlan`, any
            float dtype.
        plan: a `RoutingPlan`, `SlotPlan`, `SoftPlan` or `RaggedPlan`.

    Returns:
        Tokens (G, S, D) in the dtype of `outputs`; sparse plans sum in float32. A
        token of which every choice was dropped gets zeros.

    Raises:
        ValueError: if the shape of `outputs` is not that of the plan.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.25, 0.75]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=2, capacity=2)
    >>> outputs = np.array([[[[4.0], [4.0]], [[8.0], [8.0]]]], "float32")
    >>> np.array(ops.combine(outputs, plan))[0, :, 0].tolist()
    [5.0, 7.0]
    """
    outputs = _outputs_of(plan, outputs)
    if isinstance(plan, SoftPlan):
        weights = ops.cast(plan.combine, outputs.dtype)
        return ops.einsum("gecd,gsec->gsd", outputs, weights)
    if isinstance(plan, RaggedPlan):
        return _combine_choices(outputs, plan)
    way = _combine_slots if isinstance(plan, SlotPlan) else _combine_choices
    return by_group(lambda x, *plan_: way(x, type(plan)(*plan_)), outputs, *plan)


def _combine_choices(outputs, plan):
    """`combine` from the tokens' side: a token has K choices."""
    dim = outputs.shape[-1]
    num_groups, num_tokens, num_choices = ops.shape(plan.combine_weights)
    total = weighted_sum_of_rows(
        ops.reshape(outputs, (-1, dim)),
        ops.reshape(plan.combine_weights, (-1, num_choices)),
        _choices(plan),
        _owners(plan),
    )
    total = ops.reshape(total, (num_groups, num_tokens, dim))
    return ops.cast(total, outputs.dtype)


def _combine_slots(outputs, plan):
    """`combine` from the slots' side: a token has up to E of them, mostly none."""
    num_groups, num_tokens, _ = ops.shape(plan.token_slots)
    dim = outputs.shape[-1]
    filled = plan.slot_tokens >= 0
    weighted = ops.where(
        filled[..., None],
        plan.slot_weights[..., None] * ops.cast(outputs, "float32"),
        0.0,
    )
    first = ops.arange(num_groups, dtype="int32") * num_tokens
    rows = ops.where(filled, plan.slot_tokens + first[:, None, None], 0)
    # PyTorch's `segment_sum` would cost ten times as much.
    total = ops.scatter_update(
        ops.zeros((num_groups * num_tokens, dim), "float32"),
        ops.reshape(rows, (-1, 1)),
        ops.reshape(weighted, (-1, dim)),
        reduction="add",
    )
    total = ops.reshape(total, (num_groups, num_tokens, dim))
    return ops.cast(total, outputs.dtype)


def dispatch_einsum(tokens: Any, plan: Any) -> Any:
    """`dispatch` through the dense one-hot tensor, for small groups on TPUs.

    Args:
        tokens: (G, S, D), any float dtype.
        plan: a `RoutingPlan`, `SlotPlan` or `SoftPlan`.

    Returns:
        The experts' inputs (G, E, C, D), equal to those of `dispatch`.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.9, 0.1], [0.2, 0.8]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> tokens = np.array([[[1.0], [2.0]]], "float32")
    >>> np.array(ops.dispatch_einsum(tokens, plan))[0, :, :, 0].tolist()
    [[1.0], [2.0]]
    """
    tokens = _tokens_of(plan, tokens)
    one_hot = ops.cast(dense_dispatch(plan), tokens.dtype)
    return ops.einsum("gsd,gsec->gecd", tokens, one_hot)


def combine_einsum(outputs: Any, plan: Any) -> Any:
    """`combine` through the dense combine tensor, for small groups on TPUs.

    Args:
        outputs: the experts' outputs (G, E, C, D), any float dtype.
        plan: a `RoutingPlan`, `SlotPlan` or `SoftPlan`.

    Returns:
        Tokens (G, S, D) in the dtype of `outputs`, equal to those of `combine`.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.25, 0.75]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=2, capacity=2)
    >>> outputs = np.array([[[[4.0], [4.0]], [[8.0], [8.0]]]], "float32")
    >>> np.array(ops.combine_einsum(outputs, plan))[0, :, 0].tolist()
    [5.0, 7.0]
    """
    outputs = _outputs_of(plan, outputs)
    # In float32: bfloat16 sums over all slots would lose the small weights.
    total = ops.einsum(
        "gecd,gsec->gsd", ops.cast(outputs, "float32"), dense_combine(plan)
    )
    return ops.cast(total, outputs.dtype)
