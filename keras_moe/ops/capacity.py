"""How many tokens an expert takes from a group.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

import math
import numbers
from typing import Any

from keras import ops

from keras_moe.ops.checks import check_integer, check_positive

ROUNDINGS = {"ceil": (math.ceil, ops.ceil), "round": (round, ops.round)}


def expert_capacity(
    num_tokens: Any,
    num_experts: int,
    capacity_factor: float,
    num_selected_experts: int = 1,
    rounding: str = "ceil",
    multiple_of: int | None = None,
) -> Any:
    """The capacity C = S K c / E, rounded as the V-MoE code rounds it.

    The product is evaluated left to right in float64 and then rounded, so that
    the binary error before `ceil` is the released code's as well; `"round"` is
    half-to-even. With `multiple_of` the result is then rounded up to a multiple.

    Args:
        num_tokens: tokens per group S; an integer, or a scalar integer tensor where
            the backend traces with an unknown number of tokens (TensorFlow).
        num_experts: number of experts E.
        capacity_factor: c; the share of slots over assignments.
        num_selected_experts: K, experts per token; 1 for expert choice.
        rounding: `"ceil"` or `"round"`.
        multiple_of: round up to a multiple of this; None does not.

    Returns:
        The capacity: an int, or a scalar int32 tensor if `num_tokens` is a tensor.

    Raises:
        ValueError: if an argument is out of range, or if the capacity is below 1.

    Reference:
        *Routers in Vision Mixture of Experts*, section 2.1; V-MoE uses
        `"ceil"` and multiples of 4.

    Example:

    >>> from keras_moe.ops import expert_capacity
    >>> expert_capacity(17, 4, 1.0, num_selected_experts=2, multiple_of=4)
    12
    """
    check_integer("num_experts", num_experts)
    check_positive("capacity_factor", capacity_factor)
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"Expected rounding to be one of {sorted(ROUNDINGS)}; "
            f"received: rounding={rounding!r}"
        )
    if multiple_of is not None:
        check_integer("multiple_of", multiple_of)
    on_host, on_tensor = ROUNDINGS[rounding]
    if not isinstance(num_tokens, numbers.Integral):
        assignments = ops.cast(num_tokens * num_selected_experts, "float64")
        capacity = ops.cast(
            on_tensor(assignments * capacity_factor / num_experts), "int32"
        )
        # A tensor cannot raise: an expert keeps one slot.
        capacity = ops.maximum(capacity, 1)
        if multiple_of:
            capacity = (capacity + multiple_of - 1) // multiple_of * multiple_of
        return capacity
    capacity = on_host(
        int(num_tokens) * num_selected_experts * capacity_factor / num_experts
    )
    if capacity < 1:
        raise ValueError(
            "Expected a capacity of at least 1; received: "
            f"num_tokens={num_tokens}, num_selected_experts={num_selected_experts}, "
            f"capacity_factor={capacity_factor}, num_experts={num_experts} give "
            f"{capacity}. Use a larger group or a larger capacity_factor."
        )
    if multiple_of:
        capacity = -(-capacity // multiple_of) * multiple_of
    return capacity
