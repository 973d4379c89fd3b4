"""Initial values on JAX by one compiled function, where `jax.random` has one a shape.

Compiling takes longer than drawing. The values are the same. This can go when building
a model compiles nothing.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

# Values of a block: few blocks for large arrays, little waste for small ones.
BLOCK = 1 << 16

_INFINITY = np.float32(np.inf)


def uniform(
    shape: tuple[int, ...], lower: float, upper: float, seed: int
) -> np.ndarray | None:
    """The values of `keras.random.uniform`, float32."""
    return _draw(shape, seed, (lower, upper), False, (-_INFINITY, _INFINITY))


def normal(
    shape: tuple[int, ...], mean: float, stddev: float, seed: int
) -> np.ndarray | None:
    """The values of `keras.random.normal`, as `uniform` gives them."""
    bounds = (np.nextafter(np.float32(-1), np.float32(0)), 1.0)
    values = _draw(shape, seed, bounds, True, (-_INFINITY, _INFINITY))
    return _scaled(values, mean, stddev)


def truncated_normal(
    shape: tuple[int, ...], mean: float, stddev: float, seed: int
) -> np.ndarray | None:
    """The values of `keras.random.truncated_normal`, as `uniform` gives them."""
    bound = math.erf(math.sqrt(2.0))
    limits = (np.nextafter(np.float32(x), np.float32(0)) for x in (-2, 2))
    values = _draw(shape, seed, (-bound, bound), True, tuple(limits))
    return _scaled(values, mean, stddev)


def _scaled(values, mean, stddev):
    if values is not None:
        values *= np.float32(stddev)
        values += np.float32(mean)
    return values


def _draw(shape, seed, bounds, is_normal, limits):
    import jax

    # Counters are the places of values by a setting of JAX, and then of 64 bits.
    if not jax.config.jax_threefry_partitionable or math.prod(shape) > 1 << 32:
        return None
    key = np.array([seed, 0], "uint32")
    bounds, limits = np.array(bounds, "float32"), np.array(limits, "float32")
    values = np.empty(math.prod(shape), "float32")
    blocks = []
    for start in range(0, values.size, BLOCK):
        block = _block()(key, np.uint32(start), bounds, np.bool_(is_normal), limits)
        if isinstance(block, jax.core.Tracer):
            return None
        blocks.append(block)
    for start, block in zip(range(0, values.size, BLOCK), blocks):
        values[start : start + BLOCK] = np.asarray(block)[: values.size - start]
    return values.reshape(shape)


@functools.cache
def _block() -> Callable:
    """The compiled function of a block of values, by their flat indices."""
    import jax
    from jax import lax
    from jax.extend.random import threefry_2x32

    @jax.jit
    def block(key, start, bounds, is_normal, limits):
        places = start + lax.iota("uint32", BLOCK)
        counters = lax.concatenate([lax.full_like(places, 0), places], 0)
        high, low = lax.split(threefry_2x32((key[0], key[1]), counters), [BLOCK] * 2)
        # 23 random bits behind an exponent of 0 are uniform in [1, 2).
        bits = lax.bitwise_or((high ^ low) >> np.uint32(9), np.uint32(0x3F800000))
        values = lax.bitcast_convert_type(bits, np.float32) - np.float32(1)
        lower, upper = bounds[0], bounds[1]
        values = lax.max(lower, values * (upper - lower) + lower)
        # The root is a factor of its own: the order of roundings is `jax.random`'s.
        normals = np.float32(np.sqrt(2)) * lax.erf_inv(values)
        values = lax.select(lax.full_like(places, is_normal, bool), normals, values)
        return lax.clamp(limits[0], values, limits[1])

    return block
