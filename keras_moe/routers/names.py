"""Routers by name: one argument switches between them."""

from typing import Any

from keras_moe.ops.checks import check_one_of
from keras_moe.routers.expert_choice import ExpertChoiceRouter
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
