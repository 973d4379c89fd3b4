"""Routers by name: each class registers the names that it serves."""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import nearest
from keras_moe.routers.router import Router

# Name -> (class, arguments): the six of *Routers in Vision Mixture of Experts*,
# sections 2.1 to 2.6, one that only its released code has, and those of users.
ROUTERS: dict[str, tuple[type, dict]] = {}
# Class -> the class in its place for zero-computation experts and gating residuals.
_PATHWAY_AWARE: dict[type, type] = {}


def register_router(name: str, **arguments: Any) -> Callable[[type], type]:
    """Registers a class of routers under a name, as a decorator.

    The name then works in `keras_moe.routers.get`, in `MoEConfig(router=...)` and as
    an override of any preset.

    Args:
        name: name of the router; a class may have several.
        **arguments: arguments of the class that the name stands for.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        ValueError: if the name is taken by another class, or the class is no `Router`.

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


def register_pathway_aware(replaced: type) -> Callable[[type], type]:
    """Registers a class for experts of several kinds, in the place of another."""

    def register(cls):
        _PATHWAY_AWARE[replaced] = cls
        return cls

    return register


def router_class(router: Any) -> tuple[type, dict]:
    """The class of a router and the arguments that its name stands for."""
    if isinstance(router, str) and router in ROUTERS:
        return ROUTERS[router]
    cls = router
    if isinstance(router, str):
        cls = keras.saving.get_registered_object(router)
    if isinstance(cls, type) and issubclass(cls, Router):
        return cls, {}
    names = list(ROUTERS)
    hint = nearest(router, names) if isinstance(router, str) else ", ".join(names)
    raise ValueError(
        f"Expected router to be one of {tuple(names)}, or a subclass of Router; "
        f"received: router={router!r} ({hint})"
    )


def router_name(cls: type) -> str:
    """The name by which `router_class` gives a class back."""
    for name, (registered, arguments) in ROUTERS.items():
        if registered is cls and not arguments:
            return name
    name = keras.saving.get_registered_name(cls)
    if keras.saving.get_registered_object(name) is not cls:
        raise ValueError(
            "Expected a class of routers that is registered with Keras or by "
            f"register_router, so that a config can name it; received: {cls}"
        )
    return name


def router_class_for_types(
    router: Any, expert_types: Any, gating_residual: bool = False
) -> tuple[type, dict]:
    """The class and arguments of a router for experts of several kinds."""
    cls, arguments = router_class(router)
    if not expert_types.zero_computation and not gating_residual:
        return cls, arguments
    is_aware = issubclass(cls, tuple(_PATHWAY_AWARE.values()))
    aware = cls if is_aware else _PATHWAY_AWARE.get(cls)
    if aware is None:
        raise ValueError(
            "Expected a token choice router for zero-computation experts and gating "
            f"residuals; received: router={router!r}"
        )
    counts = {
        "zero_experts": expert_types.zero,
        "copy_experts": expert_types.copy,
        "constant_experts": expert_types.constant,
    }
    return aware, {**arguments, **counts}
