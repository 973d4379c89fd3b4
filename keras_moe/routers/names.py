"""Routers by name: one argument switches between them."""

from typing import Any

from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.routers.registry import router_class, router_class_for_types
from keras_moe.routers.router import Router


def get(name: str, num_experts: int, **options: Any) -> Router:
    """Makes a router from its name.

    Args:
        name: registered name: `"softmax_token_choice"`, `"sinkhorn_token_choice"`,
            `"sparsity_constrained_token_choice"`, `"softmax_expert_choice"`,
            `"sinkhorn_expert_choice"`, `"sparsity_constrained_expert_choice"`,
            `"soft"`, or one of `register_router`.
        num_experts: E.
        **options: arguments of the router's class.

    Returns:
        A `TokenChoiceRouter`, an `ExpertChoiceRouter`, a `SoftRouter` or a router of a
        registered class.

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
    cls, arguments = router_class(name)
    return cls(num_experts, **{**arguments, **options})


def of_types(name: str, expert_types: ExpertTypes, **options: Any) -> Router:
    """Makes a router from its name for experts of several kinds.

    Args:
        name: name as for `get`; with zero-computation experts a token choice router.
        expert_types: number of experts of each type.
        **options: arguments of the router's class.

    Returns:
        The router of `get`; with zero-computation experts or `gating_residual=True` a
        `PathwayAwareRouter` with its affinity.

    Raises:
        ValueError: as `get`, or if experts do not choose tokens of several kinds.

    Example:

    >>> from keras_moe import ops, routers
    >>> expert_types = ops.ExpertTypes(ffn=8, zero=1, copy=1, constant=2)
    >>> routers.of_types("softmax_token_choice", expert_types, tau=0.5).num_experts
    12
    """
    cls, arguments = router_class_for_types(
        name, expert_types, options.get("gating_residual", False)
    )
    return cls(expert_types.total, **{**arguments, **options})
