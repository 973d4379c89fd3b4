"""The result of a transport solver: a plan and its marginals.

Axes: G groups, S group_size, E experts.
"""

from typing import Any, NamedTuple

from keras import ops


class Transport(NamedTuple):
    """A transport plan between tokens and experts, and its marginals.

    A balanced plan gives each token a mass of 1 and each expert S / E. Solvers stop
    before that; the marginals show how near the plan is.

    Attributes:
        plan: float32 (G, S, E), not negative.
        row_marginals: float32 (G, S). The mass of each token; 1 if exact, and 0 for
            masked tokens.
        column_marginals: float32 (G, E). The mass of each expert; S / E if exact,
            where S counts the tokens that are not masked.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> transport = ops.sinkhorn(np.zeros((1, 4, 2), "float32"))
    >>> np.array(transport.column_marginals).tolist()
    [[2.0, 2.0]]
    """

    plan: Any
    row_marginals: Any
    column_marginals: Any


def with_marginals(plan: Any) -> Transport:
    """The `Transport` of a plan."""
    return Transport(plan, ops.sum(plan, axis=2), ops.sum(plan, axis=1))


def token_mass(logits: Any, mask: Any = None) -> Any:
    """The mass of each token, float32 (G, S): 1, and 0 where masked."""
    mass = ops.ones_like(logits[..., 0])
    return mass if mask is None else ops.where(ops.cast(mask, "bool"), mass, 0.0)
