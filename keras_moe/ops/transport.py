"""Transport plans between tokens and experts, and Sinkhorn's algorithm.

Axes: G groups, S group_size, E experts.
"""

from typing import NamedTuple

from keras import ops

from keras_moe._checks import check_integer, check_mask, unfit
from keras_moe._types import Tensor
from keras_moe.ops._primitives import max_along

# Iterations on one kernel. Between two of them an expert's scaling changes by a factor
# of at most S, so that five stay within float32 up to ten million tokens.
BLOCK = 5


class Transport(NamedTuple):
    """A transport plan between tokens and experts, and its marginals.

    A balanced plan gives each token a mass of 1 and each expert S / E; the marginals
    show how near a solver's plan is. S counts the tokens that are not masked.

    Attributes:
        plan: float32 (G, S, E), not negative.
        row_marginals: float32 (G, S). The mass of each token, 0 if masked.
        column_marginals: float32 (G, E). The mass of each expert.

    Example:

    >>> from keras_moe import ops
    >>> transport = ops.sinkhorn(np.zeros((1, 4, 2), "float32"))
    >>> np.array(transport.column_marginals).tolist()
    [[2.0, 2.0]]
    """

    plan: Tensor
    row_marginals: Tensor
    column_marginals: Tensor


def with_marginals(plan: Tensor) -> Transport:
    """The `Transport` of a plan."""
    return Transport(plan, ops.sum(plan, axis=2), ops.sum(plan, axis=1))


def token_mass(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mass of each token, float32 (G, S): 1, and 0 where masked."""
    mass = ops.ones_like(logits[..., 0])
    return mass if mask is None else ops.where(ops.cast(mask, "bool"), mass, 0.0)


def check_matrix(name: str, matrix: Tensor, mask: Tensor | None) -> None:
    """Validates the shapes of a matrix (G, S, E) and a mask (G, S)."""
    if len(matrix.shape) != 3:
        expected = f"{name} of shape (groups, tokens, experts)"
        raise unfit(expected, f"{name}.shape={tuple(matrix.shape)}")
    check_mask("mask", mask, matrix.shape[:2])


def sinkhorn(
    logits: Tensor, iterations: int = 20, mask: Tensor | None = None
) -> Transport:
    """The balanced plan of largest affinity and entropy.

    Maximises `<P, logits> - <P, log P>` over plans P whose rows sum to 1 and whose
    columns sum to S / E. Each iteration scales the columns, then the rows: rows are
    exact, columns approach S / E.

    Args:
        logits: float32 (G, S, E); -inf forbids a pair.
        iterations: number of iterations.
        mask: boolean (G, S), False for tokens (padding) that have no mass.

    Reference: *Routers in Vision Mixture of Experts*, equation 8.

    Example:

    >>> from keras_moe.ops import sinkhorn
    >>> logits = np.array([[[9.0, 0.0], [8.0, 0.0]]], "float32")
    >>> plan = sinkhorn(logits, iterations=100).plan  # both would like expert 0
    >>> np.array(plan, "float64").round(2)[0].tolist()
    [[0.62, 0.38], [0.38, 0.62]]
    """
    # With P = diag(a) exp(logits) diag(b), one iteration is two matrix-vector products:
    #
    #     b_e = (S / E) / sum_s exp(logits)_se a_s
    #     a_s = 1 / sum_e exp(logits)_se b_e
    #
    # The kernel exp(logits) overflows for large logits, as in the released code, and
    # iterating on logarithms costs several times more. So the kernel here is
    # exp(logits + potentials): every five iterations the scalings move into the
    # potentials, and the kernel is made anew. The first iteration is in log space: its
    # rows then sum to 1 and its columns to at least 1 / E, so nothing overflows and no
    # column vanishes, however large the logits. The iterates are the same.
    check_integer("iterations", iterations)
    logits = ops.cast(logits, "float32")
    check_matrix("logits", logits, mask)
    mass = token_mass(logits, mask)
    if mask is not None:
        logits = ops.where(ops.expand_dims(mass, -1) > 0, logits, -float("inf"))
    num_tokens = ops.sum(mass, axis=1, keepdims=True)
    share = num_tokens / ops.cast(ops.shape(logits)[2], "float32")
    potentials = _first_iteration(logits, share)
    left = iterations - 1
    plan = None
    while left > 0 or plan is None:
        *potentials, plan = _iterate(logits, share, *potentials, min(BLOCK, left))
        left -= BLOCK
    return with_marginals(plan)


def _first_iteration(logits, share):
    """The potentials of tokens (G, S) and experts (G, E) after one iteration."""
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
    return token_potential, expert_potential


def _iterate(logits, share, token_potential, expert_potential, count):
    """The potentials and the plan after `count` iterations on one kernel."""
    kernel = ops.exp(logits + token_potential[..., None] + expert_potential[:, None])
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
