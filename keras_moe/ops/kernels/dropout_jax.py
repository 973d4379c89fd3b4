"""Dropout on CPUs with JAX, whose own generator goes through memory round by round.

JAX lowers its generator, Threefry, to a loop on CPUs: each of the 20 rounds reads and
writes an integer for each value. Written out, XLA computes all of them in passing.
The values are `jax.random.bernoulli`'s, bit for bit.
"""

import functools
import math

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

# *Parallel Random Numbers: As Easy as 1, 2, 3*, Threefry-2x32 with 20 rounds.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def is_valid(x):
    """Whether `dropout` gives the values that JAX would: its settings are the usual."""
    config = jax.config
    return (
        jax.default_backend() == "cpu"
        and config.jax_default_prng_impl == "threefry2x32"
        and config.jax_threefry_partitionable
        and not config.jax_enable_x64
        and all(isinstance(size, int) for size in x.shape)
        and math.prod(x.shape) < 1 << 32
    )


@functools.partial(jax.jit, static_argnames="rate")
def dropout(x, rate, key):
    """See `keras_moe.ops.dropout`."""
    keep = 1.0 - rate
    # 23 random bits behind an exponent of 0 are uniform in [1, 2).
    bits = _random_bits(key, x.shape) >> np.uint32(9) | np.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(bits, np.float32) - np.float32(1)
    return jnp.where(uniform < np.float32(keep), x / keep, jnp.zeros_like(x))


def _random_bits(key, shape):
    """`jax.random.bits`, uint32: each value's counter is its place in the array."""
    low = lax.reshape(lax.iota(np.uint32, math.prod(shape)), shape)
    high = jnp.zeros_like(low)
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            high = high + low
            low = low << np.uint32(distance) | low >> np.uint32(32 - distance)
            low = low ^ high
        high = high + keys[(group + 1) % 3]
        low = low + keys[(group + 2) % 3] + np.uint32(group + 1)
    return high ^ low
