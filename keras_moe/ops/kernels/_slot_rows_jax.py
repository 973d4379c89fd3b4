"""The rows of expert choice's slots on JAX; TPUs add them up by matmuls of one-hots.

A TPU adds scattered rows one at a time, and takes half a minute to compile that.

Axes: G groups, S group_size, N slots of a group, D hidden.
"""

import functools

import jax
import jax.numpy as jnp

from keras_moe._backends.jax import by_platform, jit_by_platform

# Tokens of a group: the work of the matmuls grows with its square.
MOST_TOKENS = 4096


@jax.custom_vjp
def gather(tokens: jax.Array, owners: jax.Array) -> jax.Array:
    """The token (G, N, D) of each slot, zeros where `owners` (G, N) is -1."""
    num_groups, num_tokens, dim = tokens.shape
    flat = jnp.reshape(tokens, (num_groups * num_tokens, dim))
    rows = jnp.take(flat, _flat(owners, num_tokens), axis=0, mode="clip")
    return jnp.where(owners[..., None] >= 0, rows, jnp.zeros_like(rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def add_up(rows: jax.Array, owners: jax.Array, num_tokens: int, dtype: str):
    """The sum (G, S, D) of each token's float32 rows (G, N, D), cast to the dtype."""
    return _add_up(rows, owners, num_tokens, dtype)


gather.defvjp(
    lambda tokens, owners: (gather(tokens, owners), (tokens, owners)),
    lambda kept, upstream: (
        _add_up(upstream, kept[1], kept[0].shape[1], upstream.dtype.name),
        None,
    ),
)
add_up.defvjp(
    lambda rows, owners, *sizes: (_add_up(rows, owners, *sizes), owners),
    lambda num_tokens, dtype, owners, upstream: (
        gather(upstream, owners).astype("float32"),
        None,
    ),
)


def _flat(owners, num_tokens):
    """The token in each slot, counted over all groups, 0 if empty."""
    first = jnp.arange(owners.shape[0], dtype="int32") * num_tokens
    return jnp.where(owners >= 0, owners + first[:, None], 0)


@jit_by_platform(static_argnums=(2, 3))
def _add_up(rows, owners, num_tokens, dtype):
    def scatter(rows, owners):
        return by_scatter(rows, owners, num_tokens).astype(dtype)

    def matmul(rows, owners):
        return by_matmul(rows, owners, num_tokens).astype(dtype)

    if dtype != "bfloat16" or num_tokens > MOST_TOKENS:
        return scatter(rows, owners)
    return by_platform(rows, owners, tpu=matmul, default=scatter)


def by_scatter(rows, owners, num_tokens):
    num_groups, _, dim = rows.shape
    rows = jnp.where(owners[..., None] >= 0, rows, jnp.zeros_like(rows))
    total = jnp.zeros((num_groups * num_tokens, dim), rows.dtype)
    total = total.at[jnp.ravel(_flat(owners, num_tokens))].add(
        jnp.reshape(rows, (-1, dim))
    )
    return jnp.reshape(total, (num_groups, num_tokens, dim))


def by_matmul(rows, owners, num_tokens):
    """Adds up rows that are rounded to bfloat16, in float32."""
    # Empty slots count 0 times: their rows, of experts' zeros, are finite.
    is_owner = owners[..., None] == jnp.arange(num_tokens, dtype="int32")
    return jnp.einsum(
        "gns,gnd->gsd",
        is_owner.astype("bfloat16"),
        rows.astype("bfloat16"),
        preferred_element_type="float32",
    )
