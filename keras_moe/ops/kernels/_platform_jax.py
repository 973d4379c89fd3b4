"""The platforms that JAX compiles for, and what it computes in another way on each."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax import lax
from jax.extend.backend import backends

_ASKED_FOR = contextvars.ContextVar("platforms asked for", default=())


def platform() -> str:
    """What the program is for."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        # The devices may be those of a topology that is compiled for.
        return distribution.device_mesh.backend_mesh.devices.flat[0].platform
    # A device or its platform, such as within `keras.device("cpu:0")`.
    device = jax.config.jax_default_device
    return getattr(device, "platform", device) or jax.default_backend()


@contextlib.contextmanager
def traced_for(*names: str) -> Iterator[None]:
    """Traces for platforms that this process lacks, such as within `jax.export`."""
    token = _ASKED_FOR.set(names)
    try:
        yield
    finally:
        _ASKED_FOR.reset(token)


def platforms() -> tuple[str, ...]:
    """All that a program may be for, by the names that compilation has for them."""
    own = backends()
    found = {*own, *_ASKED_FOR.get()}
    if keras.distribution.distribution() is not None:
        found.add(platform())
    if "gpu" in found:
        # Devices do not tell whose they are.
        found = found - {"gpu"} | {"rocm" if "rocm" in own else "cuda"}
    return tuple(sorted(found))


def by_platform(*inputs: Any, default: Callable, **forms: Callable) -> Any:
    """`lax.platform_dependent` that traces no form of another platform.

    Otherwise, what a new version of JAX lacks for GPUs would fail on CPUs. Programs for
    other platforms get the form of CPUs, whose operations all platforms have.
    """
    anywhere = forms.get("cpu", default)
    others = {name: forms.get(name, default) for name in platforms()}
    others = {name: form for name, form in others.items() if form is not anywhere}
    if not others:
        return anywhere(*inputs)
    return lax.platform_dependent(*inputs, **others, default=anywhere)


def jit_by_platform(static_argnums: tuple[int, ...] = ()) -> Callable:
    """Decorates what calls `by_platform` with a `jax.jit` for each `platforms()`."""

    def decorate(function):
        def run(platforms, *inputs):
            return function(*inputs)

        run.__name__ = function.__name__
        static = 0, *(1 + number for number in static_argnums)
        run = jax.jit(run, static_argnums=static)
        return lambda *inputs: run(platforms(), *inputs)

    return decorate
