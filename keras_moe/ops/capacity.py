"""Expert capacity: how many tokens of a group an expert takes.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

import math
import numbers
from fractions import Fraction

import keras
from keras import ops

from keras_moe._checks import check_integer, check_one_of, check_positive
from keras_moe._types import Size
from keras_moe.ops.expert_types import ExpertTypes

ROUNDINGS = {"ceil": (math.ceil, ops.ceil), "round": (round, ops.round)}
# Denominators up to this stay exact in float64, also times a number of assignments.
LARGEST_DENOMINATOR = 10**9


def expert_capacity(
    num_tokens: Size,
    num_experts: int,
    capacity_factor: float,
    num_selected_experts: int = 1,
    *,
    rounding: str = "ceil",
    multiple_of: int | None = None,
) -> Size:
    """The capacity C = S K c / E, rounded as the V-MoE code rounds it.

    It multiplies from left to right in float64 (of tensors on JAX, in float32);
    `"round"` rounds halves to even. The capacity is at least 1.

    Args:
        num_tokens: S, tokens per group: an int, or a scalar integer tensor in a graph.
        num_experts: E, number of experts.
        capacity_factor: c, slots per assignment.
        num_selected_experts: K, experts per token; 1 for expert choice.
        rounding: `"ceil"`, as in V-MoE, or `"round"`.
        multiple_of: rounds the capacity up to a multiple of this, 4 in V-MoE; or None.

    Returns: An int, or a scalar int32 tensor if `num_tokens` is a tensor.

    Reference: *Routers in Vision Mixture of Experts*, section 2.1.

    Example:

    >>> from keras_moe.ops import expert_capacity
    >>> expert_capacity(17, 4, 1.0, num_selected_experts=2, multiple_of=4)
    12
    """
    check_integer("num_experts", num_experts)
    check_positive("capacity_factor", capacity_factor)
    return _capacity(
        num_tokens,
        num_selected_experts,
        capacity_factor,
        num_experts,
        rounding,
        multiple_of,
    )


def heterogeneous_capacity(
    num_tokens: Size,
    expert_types: ExpertTypes,
    tau: float,
    capacity_factor: float,
    num_selected_experts: int = 1,
    *,
    rounding: str = "ceil",
    multiple_of: int | None = None,
) -> tuple[Size, Size | None]:
    """The capacities of FFN and of zero-computation experts, equation 8 of *MoE++*.

    With T assignments, gamma T / (tau N_FFN + N_ZC) for a zero-computation expert, and
    tau times that for an FFN expert: a smaller tau leaves more tokens to the experts
    that cost nothing.

    The paper calls T the number of tokens, each of which goes to K=2 experts; at its
    gamma of 1.1 that would drop almost half of all choices. As in its training
    framework, T is S K here. The computation is exact, in fractions.

    Args:
        expert_types: number of experts of each type.
        tau: an FFN expert's capacity over that of a zero-computation expert.
        capacity_factor: gamma.
        rounding: `"ceil"` or `"round"`; the paper leaves it open.
        multiple_of: rounds the FFN experts' capacity up to a multiple of this; or None.
            The other arguments are those of `expert_capacity`.

    Returns: `(ffn, zero_computation)`: ints, or scalar int32 tensors if `num_tokens` is
    a tensor; the second is None without zero-computation experts.

    Example:

    >>> from keras_moe.ops import ExpertTypes, heterogeneous_capacity
    >>> heterogeneous_capacity(40, ExpertTypes(8, 1, 1, 2), tau=0.75, capacity_factor=1)
    (3, 4)
    """
    check_positive("tau", tau)
    check_positive("capacity_factor", capacity_factor)
    if not expert_types.zero_computation:
        capacity = expert_capacity(
            num_tokens,
            expert_types.ffn,
            capacity_factor,
            num_selected_experts,
            rounding=rounding,
            multiple_of=multiple_of,
        )
        return capacity, None
    exact_tau = Fraction(float(tau))
    weight = exact_tau * expert_types.ffn + expert_types.zero_computation
    capacities = []
    for scale, multiple in ((exact_tau, multiple_of), (1, None)):
        share = Fraction(float(capacity_factor)) * scale / weight
        # The nearest simple fraction, since 1.1 in binary is not 11/10.
        share = share.limit_denominator(LARGEST_DENOMINATOR)
        capacity = _capacity(
            num_tokens,
            num_selected_experts,
            share.numerator,
            share.denominator,
            rounding,
            multiple,
        )
        capacities.append(capacity)
    ffn, zero_computation = capacities
    return ffn, zero_computation


def _capacity(num_tokens, num_selected_experts, factor, divisor, rounding, multiple_of):
    """`num_tokens * num_selected_experts * factor / divisor`, rounded."""
    check_one_of("rounding", rounding, ROUNDINGS)
    check_integer("multiple_of", multiple_of, optional=True)
    check_integer("num_selected_experts", num_selected_experts)
    on_host, on_tensor = ROUNDINGS[rounding]
    # At least 1, as rounded up: a last batch may be too small for the nearest number.
    if isinstance(num_tokens, numbers.Integral):
        check_integer("num_tokens", num_tokens)
        assignments = int(num_tokens) * num_selected_experts
        capacity = max(on_host(assignments * factor / divisor), 1)
    else:
        # JAX would warn that it has no float64, and use float32.
        dtype = "float32" if keras.backend.backend() == "jax" else "float64"
        assignments = ops.cast(num_tokens * num_selected_experts, dtype)
        capacity = ops.cast(on_tensor(assignments * factor / divisor), "int32")
        capacity = ops.maximum(capacity, 1)
    if multiple_of:
        capacity = (capacity + multiple_of - 1) // multiple_of * multiple_of
    return capacity
