"""JAX: platforms, arrays over devices and processes, solvers, exported programs."""

import contextlib
import contextvars
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.backend import backends
from jax.scipy.linalg import cho_solve

_ASKED_FOR: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "platforms asked for", default=()
)


def platform() -> str:
    """What the program is for."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        # The devices may be those of a topology that is compiled for.
        return distribution.device_mesh.backend_mesh.devices.flat[0].platform
    # A device or its platform, such as within `keras.device("cpu:0")`.
    config: Any = jax.config
    device = config.jax_default_device
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


def by_platform(*inputs: object, default: Callable, **forms: Callable) -> Any:
    """`lax.platform_dependent` that traces no form of another platform."""
    # Otherwise, what a new version of JAX lacks for GPUs would fail on CPUs. Programs
    # for other platforms get the form of CPUs, whose operations all platforms have.
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


def process_shard() -> tuple[int, int]:
    """This process's index, and the number of processes."""
    return jax.process_index(), jax.process_count()


def placed(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array on the devices of all processes, each of which has all values."""
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def with_shards(value: jax.Array) -> jax.Array:
    """The same array, with readable `addressable_shards`."""
    # With one device per process, JAX (0.10.2) does not find the shards of a local
    # array put to all processes, as Keras does with biases.
    try:
        value.addressable_shards  # noqa: B018
    except ValueError:
        # Only whole arrays are affected.
        return placed(np.asarray(value), value.sharding)
    return value


def exchange(content: bytes) -> list[bytes]:
    """All-gathers bytes: every process must call it, and gets those of all."""
    sizes = multihost_utils.process_allgather(np.array([len(content)], "int32"))
    sizes = np.ravel(sizes)
    padded = np.zeros(int(sizes.max()), "uint8")
    padded[: len(content)] = np.frombuffer(content, "uint8")
    rows = np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1))
    return [row[:size].tobytes() for row, size in zip(rows, sizes)]


@jax.jit
def solve(matrices: jax.Array, columns: jax.Array) -> jax.Array:
    """The X of A X = B, with A (..., N, N) and B (..., N, M)."""
    factors = lax.linalg.cholesky(matrices, symmetrize_input=False)
    return cho_solve((factors, True), columns)


_VERSION = "get_version_from_compatibility_requirement"


@contextlib.contextmanager
def readable_by_tensorflow() -> Iterator[None]:
    """Within it, JAX writes programs for TensorFlow, or raises a ValueError."""
    # JAX writes the StableHLO that was new four weeks before it, which may be newer
    # than TensorFlow's, and has no argument for it.
    import tensorflow as tf
    from jaxlib.mlir.dialects import stablehlo as of_jax
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    # Made by a compiler, so that a checker knows nothing of it.
    of_tensorflow: Any = stablehlo
    readable, own = of_tensorflow.get_current_version(), getattr(of_jax, _VERSION)

    def version(requirement):
        return of_tensorflow.get_smaller_version(readable, own(requirement))

    setattr(of_jax, _VERSION, version)
    try:
        yield
    except Exception as error:
        if "StableHLO" not in str(error):
            raise
        raise ValueError(
            f"Expected operations of StableHLO {readable}, which TensorFlow "
            f"{tf.__version__} reads. A newer TensorFlow may have more, and "
            "KERAS_BACKEND=tensorflow exports without StableHLO; received: "
            f"{textwrap.shorten(str(error), 250)}"
        ) from error
    finally:
        setattr(of_jax, _VERSION, own)


def use_cache(folder: str) -> None:
    """Keeps programs that take a second or more to compile for later processes."""
    jax.config.update("jax_compilation_cache_dir", folder)
    enable_cache(True)


def enable_cache(enabled: bool) -> None:
    """Reads and writes programs on disk from now on, or no longer."""
    jax.config.update("jax_enable_compilation_cache", enabled)
    # Otherwise JAX decides once, at a process's first compilation.
    compilation_cache.reset_cache()
