"""Sparsity-constrained transport: balanced plans with few nonzeros per expert or token.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

from typing import Any

from keras import ops

from keras_moe._checks import check_integer, check_one_of, check_positive
from keras_moe.ops import _sparse_solvers as solvers
from keras_moe.ops._sparse_solvers import FORBIDDEN, project
from keras_moe.ops.transport import Transport, check_matrix, token_mass, with_marginals

SIDES = ("expert", "token")
SOLVERS = ("newton", "adam")
ITERATIONS = {"newton": 10, "adam": 20}


def sparse_transport(
    utility: Any,
    side: str = "expert",
    max_nonzeros: Any = None,
    solver: str = "newton",
    iterations: int | None = None,
    learning_rate: float = 0.01,
    mask: Any = None,
) -> Transport:
    """The transport plan of largest utility among those with few nonzeros.

    Maximises `sum(plan * utility) - sum(plan**2) / 2` over plans whose rows sum to 1
    and columns to S / E, with at most C nonzeros in a column (side `"expert"`) or K in
    a row (`"token"`): equation 9 of *Routers in Vision Mixture of Experts*. Its
    semi-dual is minimised over potentials of the other side, and the plan is each
    expert's (token's) projection at the minimum. So the marginals of `side` and the
    bound hold exactly, the other marginals nearly. Entries that are equal go to the
    lowest index.

    `"newton"` smooths the choice of nonzeros and takes Newton steps, most of them on a
    sample of the tokens, while the smoothing shrinks. `"adam"` is the published solver:
    steps of Adam, each with an exact projection, until the gradient's norm is 1e-3.

    Args:
        utility: float32 (G, S, E), about 1 or less in size; -inf forbids a pair.
        side: bound side, `"expert"` or `"token"`.
        max_nonzeros: bound C or K, an int or a scalar integer tensor; None for none.
        solver: `"newton"` or `"adam"`. A JAX model that is exported as a SavedModel
            needs Adam: TensorFlow lacks JAX's linear solver.
        iterations: steps of the solver; None takes 10 of Newton, 20 of Adam.
        learning_rate: learning rate of Adam.
        mask: boolean (G, S), False for tokens (padding) that are not transported.

    Returns: A `Transport`. Gradients flow through the last projection, as if potentials
    and nonzeros were constants.

    Reference: - [Liu et al., 2023](https://arxiv.org/abs/2209.15466)

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.sparse_transport import sparse_transport
    >>> utility = np.array([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]]])
    >>> transport = sparse_transport(utility.astype("float32"), max_nonzeros=2)
    >>> np.round(np.array(transport.plan), 2).tolist()  # two tokens per expert
    [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    """
    utility = ops.convert_to_tensor(utility)
    check_matrix("utility", utility, mask)
    check_one_of("side", side, SIDES)
    check_one_of("solver", solver, SOLVERS)
    check_positive("learning_rate", learning_rate)
    if iterations is None:
        iterations = ITERATIONS[solver]
    check_integer("iterations", iterations)
    if hasattr(max_nonzeros, "dtype"):
        max_nonzeros = ops.cast(max_nonzeros, "int32")
    elif max_nonzeros is not None:
        check_integer("max_nonzeros", max_nonzeros)
    mass = token_mass(utility, mask)
    allowed = (utility > FORBIDDEN) & (ops.expand_dims(mass, -1) > 0)
    share = ops.sum(mass, axis=1)[:, None, None] / utility.shape[-1]
    if side == "expert":
        # The bound side comes first, (G, E, S): sums over either axis are fast.
        utility, allowed = (ops.swapaxes(x, 1, 2) for x in (utility, allowed))
        masses = share, ops.expand_dims(mass, 1)
    else:
        masses = ops.expand_dims(mass, -1), share
    values = ops.where(allowed, utility, FORBIDDEN)
    constant = ops.stop_gradient(values)
    potential, guess = potentials(
        constant, *masses, side, max_nonzeros, solver, iterations, learning_rate
    )
    values = values + ops.stop_gradient(potential)
    plan = project(values, allowed, masses[0], max_nonzeros, guess)
    return with_marginals(ops.swapaxes(plan, 1, 2) if side == "expert" else plan)


def potentials(
    values: Any,
    mass: Any,
    target: Any,
    side: str,
    max_nonzeros: Any,
    solver: str,
    iterations: int,
    learning_rate: float = 0.01,
) -> tuple[Any, tuple | None]:
    """Minimises the semi-dual."""
    if solver == "adam":
        arguments = (max_nonzeros, iterations, learning_rate)
        return solvers.adam(values, mass, target, *arguments), None
    if side == "token":
        return solvers.newton_of_tokens(values, mass, max_nonzeros, iterations), None
    return solvers.ExpertDual(values, mass, target, max_nonzeros).solve(iterations)


def semi_dual(
    potential: Any, values: Any, allowed: Any, mass: Any, target: Any, max_nonzeros: Any
) -> Any:
    """The objective that solvers minimise: a bound on the worth of the best plan."""
    values = values + potential
    plan = project(values, allowed, mass, max_nonzeros)
    worth = ops.sum(plan * (values - 0.5 * plan), axis=(1, 2))
    return worth - ops.sum(target * potential, axis=(1, 2))
