"""Routers by name: one argument switches between them."""

from typing import Any

from keras_moe.checks import check_one_of
from keras_moe.ops.expert_kinds import ExpertKinds
from keras_moe.routers.expert_choice import ExpertChoiceRouter
from keras_moe.routers.pathway_aware import PathwayAwareRouter
from keras_moe.routers.router import Router
from keras_moe.routers.soft import SoftRouter
from keras_moe.routers.token_choice import TokenChoiceRouter

# The six of *Routers in Vision Mixture of Experts*, sections 2.1 to 2.6, and one that
# only its released code has: name -> (class, arguments).
ROUTERS = {
    "softmax_token_choice": (TokenChoiceRouter, {"affinity": "softmax"}),
    "sinkhorn_token_choice": (TokenChoiceRouter, {"affinity": "sinkhorn"}),
    "sparsity_constrained_token_choice": (
        TokenChoiceRouter,
        {"affinity": "sparsity_constrained"},
    ),
    "softmax_expert_choice": (ExpertChoiceRouter, {"affinity": "softmax"}),
    "sinkhorn_expert_choice": (ExpertChoiceRouter, {"affinity": "sinkhorn"}),
    "sparsity_constrained_expert_choice": (
        ExpertChoiceRouter,
        {"affinity": "sparsity_constrained"},
    ),
    "soft": (SoftRouter, {}),
}


def get(name: str, num_experts: int, **options: Any) -> Router:
    """Makes a router from its name.

    Args:
        name: one of `ROUTERS`: `"softmax_token_choice"`, `"sinkhorn_token_choice"`,
            `"sparsity_constrained_token_choice"`, `"softmax_expert_choice"`,
            `"sinkhorn_expert_choice"`, `"sparsity_constrained_expert_choice"` or
            `"soft"`.
        num_experts: E.
        **options: arguments of the router's class.

    Returns:
        A `TokenChoiceRouter`, `ExpertChoiceRouter` or `SoftRouter`.

    Raises:
        ValueError: if the name is unknown or an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, sections 2.1 to 2.6.

    Example:

    >>> from keras_moe import routers
    >>> router = routers.get("sinkhorn_expert_choice", num_experts=8, capacity_factor=2)
    >>> type(router).__name__, type(router.affinity).__name__
    ('ExpertChoiceRouter', 'SinkhornAffinity')
    """
    check_one_of("router", name, list(ROUTERS))
    cls, arguments = ROUTERS[name]
    return cls(num_experts, **{**arguments, **options})


def of_kinds(name: str, kinds: ExpertKinds, **options: Any) -> Router:
    """Makes a router from its name for experts of several kinds.

    Args:
        name: one of `ROUTERS`; with zero-computation experts a token choice router.
        kinds: how many experts there are of each kind.
        **options: arguments of the router's class.

    Returns:
        The router of `get`; with zero-computation experts or `gating_residual=True` a
        `PathwayAwareRouter` with its affinity.

    Raises:
        ValueError: as `get`, or if experts do not choose tokens of several kinds.

    Example:

    >>> from keras_moe import ops, routers
    >>> kinds = ops.ExpertKinds(ffn=8, zero=1, copy=1, constant=2)
    >>> routers.of_kinds("softmax_token_choice", kinds, tau=0.5).num_experts
    12
    """
    cls, arguments = class_of_kinds(name, kinds, options.get("gating_residual", False))
    return cls(kinds.total, **{**arguments, **options})


def class_of_kinds(
    name: str, kinds: ExpertKinds, gating_residual: bool = False
) -> tuple[type, dict]:
    """The class and the arguments of `of_kinds`, without `num_experts`."""
    cls, arguments = ROUTERS[check_one_of("router", name, list(ROUTERS))]
    if not kinds.zero_computation and not gating_residual:
        return cls, arguments
    if cls is not TokenChoiceRouter:
        raise ValueError(
            "Expected a token choice router for zero-computation experts and gating "
            f"residuals; received: router={name!r}"
        )
    counts = {
        "zero_experts": kinds.zero,
        "copy_experts": kinds.copy,
        "constant_experts": kinds.constant,
    }
    return PathwayAwareRouter, {**arguments, **counts}
