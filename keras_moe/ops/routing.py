"""The record of a router, for losses, gating residuals and analysis.

Axes: G groups, S group_size, E experts, C capacity.
"""

from typing import Any, NamedTuple


class Routing(NamedTuple):
    """The record of a router: float32 arrays for losses, residuals and analysis.

    A router returns it by group; the MoE layer returns it aligned with its own
    tokens, so the leading axes are then (batch, tokens).

    Attributes:
        logits: (G, S, E). The router's logits, without noise. Soft routers have one
            for each slot: (G, S, E, C).
        noisy_logits: the logits that routed: with noise while training, and scaled
            where a router scales them; equal to `logits` otherwise; the same shape.
        affinity: (G, S, E). The matrix that allocated the slots: the gates, or a
            transport plan.
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
