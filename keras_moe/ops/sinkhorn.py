"""Sinkhorn: the entropy-regularised transport plan between tokens and experts.

Axes: G groups, S group_size, E experts.
"""

from typing import Any

from keras import ops

from keras_moe.checks import check_integer, check_positive
from keras_moe.ops.empty import max_along
from keras_moe.ops.transport import Transport, token_mass, with_marginals

# Iterations on one kernel. Between two of them an expert's scaling changes by a factor
# of at most S, so that five stay within float32 up to ten million tokens.
BLOCK = 5


def sinkhorn(
    logits: Any,
    iterations: int = 20,
    tolerance: float | None = None,
    mask: Any = None,
) -> Transport:
    """The plan of largest affinity and entropy with balanced marginals.

    Equation 8 of *Routers in Vision Mixture of Experts*: maximises
    `<P, logits> - <P, log P>` over plans P whose rows sum to 1 and whose columns sum
    to S / E. Each iteration scales the columns, then the rows: rows are exact, columns
    approach S / E.

    The iterations run on the kernel exp(logits + potentials), in which one is two
    matrix-vector products. Every five the scalings move into the potentials and the
    kernel is made anew, the first time after one iteration in log space: its rows then
    sum to 1 and its columns to at least 1 / E, so nothing overflows and no column
    vanishes, however large the logits. The iterates are those of the plain kernel form
    of the released code (which overflows) and of the log form (which costs several
    times more).

    Args:
        logits: float32 (G, S, E); -inf forbids a pair.
        iterations: number of iterations, the largest one with a `tolerance`.
        tolerance: error of the experts' masses as a share of S / E, at which each group
            stops by itself; None runs all iterations. No gradient flows with a
            tolerance.
        mask: boolean (G, S), False for tokens (padding) that have no mass.

    Returns:
        A `Transport`.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 8.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops import sinkhorn
    >>> logits = np.array([[[9.0, 0.0], [8.0, 0.0]]], "float32")
    >>> plan = sinkhorn(logits, iterations=100).plan  # both would like expert 0
    >>> np.array(plan, "float64").round(2)[0].tolist()
    [[0.62, 0.38], [0.38, 0.62]]
    """
    check_integer("iterations", iterations)
    if tolerance is not None:
        check_positive("tolerance", tolerance)
    logits = ops.cast(logits, "float32")
    if len(logits.shape) != 3:
        raise ValueError(
            "Expected logits of shape (groups, tokens, experts); "
            f"received: logits.shape={tuple(logits.shape)}"
        )
    mass = token_mass(logits, mask)
    if mask is not None:
        logits = ops.where(ops.expand_dims(mass, -1) > 0, logits, -float("inf"))
    num_tokens = ops.sum(mass, axis=1, keepdims=True)
    share = num_tokens / ops.cast(ops.shape(logits)[2], "float32")

    # The first iteration, in log space.
    columns = _log_sum_exp(logits, axis=1)
    # No token may go to the other experts.
    reachable = columns > -float("inf")
    expert_potential = ops.where(
        reachable,
        ops.log(ops.maximum(share, 1e-30)) - ops.where(reachable, columns, 0.0),
        0.0,
    )
    rows = _log_sum_exp(logits + expert_potential[:, None], axis=2)
    routable = rows > -float("inf")
    token_potential = ops.where(routable, -ops.where(routable, rows, 0.0), 0.0)

    def advance(token_potential, expert_potential, count):
        """The plan and the potentials after `count` further iterations."""
        kernel = ops.exp(
            logits + token_potential[..., None] + expert_potential[:, None]
        )
        # The potentials' rounding, which is that of large logits, leaves the rows.
        token_scale = _divide(1.0, ops.sum(kernel, axis=2))
        expert_scale = ops.ones_like(expert_potential)
        for _ in range(count):
            columns = ops.einsum("gse,gs->ge", kernel, token_scale)
            expert_scale = _divide(share, columns)
            rows = ops.einsum("gse,ge->gs", kernel, expert_scale)
            token_scale = _divide(1.0, rows)
        plan = kernel * token_scale[..., None] * expert_scale[:, None]
        return (
            token_potential + ops.log(token_scale),
            expert_potential + ops.log(expert_scale),
            plan,
        )

    left = iterations - 1
    if tolerance is None:
        potentials = (token_potential, expert_potential)
        plan = None
        while left > 0 or plan is None:
            *potentials, plan = advance(*potentials, min(BLOCK, left))
            left -= BLOCK
        return with_marginals(plan)

    def unbalanced(plan):
        columns = ops.sum(plan, axis=1)
        return max_along(ops.abs(columns - share), axis=1) > tolerance * share[:, 0]

    def proceed(*state):
        _, _, plan = state
        return ops.any(unbalanced(plan))

    def body(token_potential, expert_potential, plan):
        # A group that is done stays as it is while others go on.
        goes_on = unbalanced(plan)
        *potentials, next_plan = advance(token_potential, expert_potential, BLOCK)
        return (
            ops.where(goes_on[:, None], potentials[0], token_potential),
            ops.where(goes_on[:, None], potentials[1], expert_potential),
            ops.where(goes_on[:, None, None], next_plan, plan),
        )

    state = advance(
        ops.stop_gradient(token_potential), ops.stop_gradient(expert_potential), 0
    )
    logits = ops.stop_gradient(logits)
    *_, plan = ops.while_loop(
        proceed, body, state, maximum_iterations=-(-left // BLOCK)
    )
    return with_marginals(ops.stop_gradient(plan))


def _log_sum_exp(x, axis):
    """`logsumexp` that is -inf where all entries are, with a finite gradient."""
    top = ops.stop_gradient(max_along(x, axis=axis, keepdims=True))
    top = ops.where(top > -float("inf"), top, 0.0)
    total = ops.sum(ops.exp(x - top), axis=axis)
    positive = total > 0
    return ops.where(
        positive,
        ops.log(ops.where(positive, total, 1.0)) + ops.squeeze(top, axis),
        -float("inf"),
    )


def _divide(a, b):
    """a / b, and 1 where b is 0: a token or an expert without any mass."""
    return ops.where(b > 0, a / ops.where(b > 0, b, 1.0), 1.0)
