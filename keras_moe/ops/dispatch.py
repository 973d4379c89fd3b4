"""Moving tokens to slots and expert outputs back to tokens.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any

from keras import ops

from keras_moe.ops.routing import RoutingPlan, dense_combine, dense_dispatch


def _tokens_of(plan, tokens):
    """`tokens` as a tensor, if its shape is that of the plan's tokens."""
    tokens = ops.convert_to_tensor(tokens)
    expected = tuple(plan.token_slots.shape[:2])
    if len(tokens.shape) != 3 or not _fits(tokens.shape[:2], expected):
        raise ValueError(
            f"Expected tokens of shape (groups, tokens, dim) with {expected} first, as "
            f"in the plan; received: tokens.shape={tuple(tokens.shape)}"
        )
    return tokens


def _outputs_of(plan, outputs):
    """`outputs` as a tensor, if its shape is that of the plan's slots."""
    outputs = ops.convert_to_tensor(outputs)
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


def dispatch(tokens: Any, plan: RoutingPlan) -> Any:
    """Gathers each slot's token: `X^T D` of equation 2 in index form.

    Args:
        tokens: (G, S, D), any float dtype.
        plan: the `RoutingPlan`.

    Returns:
        The experts' inputs (G, E, C, D) in the dtype of `tokens`; empty slots
        hold zeros.

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
    num_groups, num_tokens, dim = ops.shape(tokens)
    filled = plan.slot_tokens >= 0
    first = ops.arange(num_groups, dtype="int32") * num_tokens
    rows = ops.where(filled, plan.slot_tokens + first[:, None, None], 0)
    inputs = ops.take(ops.reshape(tokens, (-1, dim)), rows, axis=0)
    return ops.where(filled[..., None], inputs, ops.zeros_like(inputs))


def combine(outputs: Any, plan: RoutingPlan) -> Any:
    """Sums each token's expert outputs by their combine weights.

    Args:
        outputs: the experts' outputs (G, E, C, D), any float dtype.
        plan: the `RoutingPlan`.

    Returns:
        Tokens (G, S, D) in the dtype of `outputs`, summed in float32; a token
        of which every choice was dropped gets zeros.

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
    num_groups, num_experts, capacity, dim = ops.shape(outputs)
    first = ops.arange(num_groups, dtype="int32") * (num_experts * capacity)
    kept = plan.token_slots >= 0
    rows = ops.where(kept, plan.token_slots, 0) + first[:, None, None]
    flat = ops.reshape(outputs, (-1, dim))
    # An unrolled sum over K is much cheaper than a (G, S, K, D) tensor and its sum.
    total = 0.0
    for k in range(plan.token_slots.shape[-1]):
        chosen = ops.cast(ops.take(flat, rows[..., k], axis=0), "float32")
        # A dropped choice has read another token's slot, which may not be finite.
        chosen = ops.where(kept[..., k : k + 1], chosen, 0.0)
        total = total + plan.combine_weights[..., k : k + 1] * chosen
    return ops.cast(total, outputs.dtype)


def dispatch_einsum(tokens: Any, plan: RoutingPlan) -> Any:
    """`dispatch` through the dense one-hot tensor, for small groups on TPUs.

    Args:
        tokens: (G, S, D), any float dtype.
        plan: the `RoutingPlan`.

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


def combine_einsum(outputs: Any, plan: RoutingPlan) -> Any:
    """`combine` through the dense combine tensor, for small groups on TPUs.

    Args:
        outputs: the experts' outputs (G, E, C, D), any float dtype.
        plan: the `RoutingPlan`.

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
