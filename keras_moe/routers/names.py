"""Routers by name."""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe._checks import check_argument_names, nearest, unfit
from keras_moe._types import Config
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.routers.expert_choice import ExpertChoiceRouter
from keras_moe.routers.pathway_aware import PathwayAwareRouter
from keras_moe.routers.router import Router, router_arguments
from keras_moe.routers.soft import SoftRouter
from keras_moe.routers.token_choice import TokenChoiceRouter

# Name -> (class, arguments): the routers of *Routers in Vision Mixture of Experts*,
# sections 2.1 to 2.6, one more from its released code, and registered ones.
ROUTERS: dict[str, tuple[type, dict]] = {
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


def register_router(name: str, **arguments: object) -> Callable[[type], type]:
    """Registers a router class under a name; a decorator.

    Args:
        name: name of the router; a class may have several.
        **arguments: constructor arguments that the name stands for.

    Example:

    >>> from keras_moe import routers
    >>> @routers.register_router("one_hot_token_choice", num_selected_experts=1)
    ... class OneHot(routers.TokenChoiceRouter):
    ...     pass
    >>> routers.get("one_hot_token_choice", num_experts=4).num_selected_experts
    1
    >>> del routers.ROUTERS["one_hot_token_choice"]
    """

    def register(cls):
        if not (isinstance(cls, type) and issubclass(cls, Router)):
            raise ValueError(f"Expected a subclass of Router; received: {cls!r}")
        registered = ROUTERS.get(name, (cls, {}))[0]
        if registered.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"Expected a new name of a router; received: name={name!r}, which "
                f"stands for {registered.__name__}"
            )
        ROUTERS[name] = (cls, arguments)
        return cls

    return register


def get(
    router: str | Config | type[Router],
    num_experts: int | ExpertTypes,
    **arguments: object,
) -> Router:
    """Makes a router by name.

    Args:
        router: `"soft"`, or `"softmax"`, `"sinkhorn"` or `"sparsity_constrained"`
            followed by `"_token_choice"` or `"_expert_choice"`; or a name registered
            with `register_router`, a dict of `"name"` and arguments, or a class.
        num_experts: E, or `keras_moe.ops.ExpertTypes` for experts of several types.
        **arguments: further arguments of the router's class.

    Returns: A `Router`; a `PathwayAwareRouter` if there are zero-computation experts or
    `gating_residual` is given.

    Reference: *Routers in Vision Mixture of Experts*, sections 2.1 to 2.6.

    Example:

    >>> from keras_moe import routers
    >>> router = routers.get("sinkhorn_expert_choice", num_experts=8, capacity_factor=2)
    >>> type(router).__name__, type(router.affinity).__name__
    ('ExpertChoiceRouter', 'SinkhornAffinity')
    """
    is_typed = isinstance(num_experts, ExpertTypes)
    types = num_experts if is_typed else ExpertTypes(num_experts)
    name, own = split_router(router)
    has_residual = "gating_residual" in arguments
    cls, named = class_for_types(name, types, has_residual)
    arguments = {**named, **own, **arguments}
    if types.zero_computation:
        arguments |= types.arguments()
    names = [*router_arguments(cls), "name", "trainable", "dtype"]
    check_argument_names(arguments, names, cls.__name__)
    total = types.total if types.zero_computation else types.ffn
    return cls(total, **arguments)


def split_router(router: object) -> tuple[Any, dict]:
    """Splits a router description into name (or class) and arguments."""
    if not isinstance(router, dict):
        return router, {}
    if "name" not in router:
        expected = "router to be a name or a dict with the router's 'name'"
        raise unfit(expected, router=router)
    return router["name"], {k: v for k, v in router.items() if k != "name"}


def router_class(router: object) -> tuple[type, dict]:
    """Looks up a router's class and the arguments that its name stands for."""
    if isinstance(router, str) and router in ROUTERS:
        return ROUTERS[router]
    cls = router
    if isinstance(router, str):
        cls = keras.saving.get_registered_object(router)
    if isinstance(cls, type) and issubclass(cls, Router):
        return cls, {}
    names = list(ROUTERS)
    hint = nearest(router, names) if isinstance(router, str) else ", ".join(names)
    expected = f"router to be one of {tuple(names)}, or a subclass of Router"
    raise unfit(expected, f"router={router!r} ({hint})")


def router_name(cls: type) -> str:
    """Returns a name from which `router_class` finds the class."""
    for name, (registered, arguments) in ROUTERS.items():
        if registered is cls and not arguments:
            return name
    name = keras.saving.get_registered_name(cls)
    if keras.saving.get_registered_object(name) is not cls:
        raise unfit("a class registered by register_router or with Keras", router=cls)
    return name


def class_for_types(
    router: object, types: ExpertTypes, has_residual: bool
) -> tuple[type, dict]:
    """Like `router_class`, but MoE++'s router where expert types require it."""
    cls, arguments = router_class(router)
    if not types.zero_computation and not has_residual:
        return cls, arguments
    if cls is TokenChoiceRouter:
        cls = PathwayAwareRouter
    if not issubclass(cls, PathwayAwareRouter):
        use = "zero-computation experts and gating residuals"
        raise unfit(f"a token choice router for {use}", router=router)
    return cls, arguments
