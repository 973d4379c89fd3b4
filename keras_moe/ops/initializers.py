"""Initial values by one compiled function for all shapes, or without drawing any.

On JAX Keras compiles once for each shape and distribution, which takes seconds for a
small model; `FastInitializer` can go when it no longer does. `skip_init` is for weights
that are loaded anyway.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import initializers

from keras_moe.compat import compute_fans
from keras_moe.ops.kernels import host_memory, random_jax

# The spread of a normal distribution that is cut at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978

_SKIPS = contextvars.ContextVar("skips", default=False)


@keras.saving.register_keras_serializable("keras_moe")
class FastInitializer(keras.initializers.Initializer):
    """The same values as another initializer, without a compilation for each shape."""

    def __init__(self, initializer: Any):
        self.initializer = keras.initializers.get(initializer)

    def __call__(self, shape, dtype=None):
        skipped = skipped_value(self.initializer, shape, dtype)
        if skipped is not None:
            return skipped
        values = host_values(self.initializer, shape, dtype)
        if values is None:
            return self.initializer(shape, dtype=dtype)
        return host_memory.to_tensor(values)

    def get_config(self):
        return {"initializer": keras.initializers.serialize(self.initializer)}


@contextlib.contextmanager
def skip_init(wanted: bool = True) -> Iterator[None]:
    """Weights made within the context are zeros that take no memory until written."""
    token = _SKIPS.set(wanted)
    try:
        yield
    finally:
        _SKIPS.reset(token)


def skipped_value(initializer: Any, shape: Any, dtype: Any = None) -> Any | None:
    """The value of a weight within `skip_init`; None if it must be drawn."""
    # Drawing advances a generator, which other layers may share.
    draws = isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
    if draws or not _SKIPS.get():
        return None
    dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    return host_memory.lazy_zeros(tuple(shape), dtype)


def host_values(initializer: Any, shape: Any, dtype: Any = None) -> np.ndarray | None:
    """An initializer's values as a NumPy array, where that saves compilations."""
    if keras.backend.backend() != "jax" or keras.distribution.distribution():
        return None
    if keras.backend.standardize_dtype(dtype or keras.config.floatx()) != "float32":
        return None
    # A subclass with its own `__call__` has other values.
    draw = _DRAWS.get(type(initializer).__call__)
    return None if draw is None else draw(initializer, tuple(shape))


def _constant(initializer, shape, value=None):
    value = initializer.value if value is None else value
    if not isinstance(value, (int, float)):
        return None
    return np.full(shape, value, "float32")


def _draw(function, shape, first, second, seed):
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        return None
    return function(shape, first, second, seed)


def _uniform(initializer, shape):
    bounds = initializer.minval, initializer.maxval
    return _draw(random_jax.uniform, shape, *bounds, initializer.seed)


def _normal(initializer, shape, function=random_jax.normal):
    spread = initializer.mean, initializer.stddev
    return _draw(function, shape, *spread, initializer.seed)


def _variance_scaling(initializer, shape):
    axes = initializer.input_axes, initializer.output_axes
    fan_in, fan_out = compute_fans(shape, *axes)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}
    stddev = (initializer.scale / max(1.0, fans[initializer.mode])) ** 0.5
    if initializer.distribution == "uniform":
        limit = (3.0 * initializer.scale / max(1.0, fans[initializer.mode])) ** 0.5
        bounds = -limit, limit
        return _draw(random_jax.uniform, shape, *bounds, initializer.seed)
    function = random_jax.normal
    if initializer.distribution == "truncated_normal":
        stddev /= _TRUNCATED_STDDEV
        function = random_jax.truncated_normal
    return _draw(function, shape, 0.0, stddev, initializer.seed)


# Keras's initializers by the method that makes their values.
_DRAWS = {
    initializers.Zeros.__call__: functools.partial(_constant, value=0.0),
    initializers.Ones.__call__: functools.partial(_constant, value=1.0),
    initializers.Constant.__call__: _constant,
    initializers.RandomUniform.__call__: _uniform,
    initializers.RandomNormal.__call__: _normal,
    initializers.TruncatedNormal.__call__: functools.partial(
        _normal, function=random_jax.truncated_normal
    ),
    initializers.VarianceScaling.__call__: _variance_scaling,
}
