"""The queues of token choice on TPUs, by matmuls of one-hots.

A TPU scatters and gathers numbers one at a time, and its sorts and scatters take many
seconds to compile. One-hots are exact in bfloat16, and so are sums of them in float32.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keras_moe._backends.jax import by_platform, jit_by_platform

# The comparisons of a group's tokens, or of its choices and positions: 32 MB.
MOST_PAIRS = 2**24
# Whole numbers up to this are exact in bfloat16.
BASE = 256
# Rows up to which this costs less than a scatter; two digits count them.
MOST_ROWS = 2**15
# The width of a TPU's registers.
LANES = 128


def fill_slots(
    experts: jax.Array,
    rank: jax.Array | None,
    num_experts: int,
    num_slotted: int,
    capacity: Any,
    other: Callable,
) -> tuple[jax.Array, jax.Array]:
    """`token_choice.fill_slots`; `other` does the same on other platforms."""
    _, num_tokens, num_choices = experts.shape
    sizes = num_experts, num_slotted, capacity
    is_known = all(isinstance(x, int) for x in (num_tokens, *sizes))
    if is_known and num_tokens * max(num_tokens, num_choices * capacity) <= MOST_PAIRS:
        return _fill_slots(experts, rank, sizes, other)
    return other(experts, rank, *sizes)


@jit_by_platform(static_argnums=(2, 3))
def _fill_slots(experts, rank, sizes, other):
    return by_platform(
        experts,
        rank,
        tpu=lambda *inputs: by_counting(*inputs, *sizes),
        default=lambda *inputs: other(*inputs, *sizes),
    )


def by_counting(experts, rank, num_experts, num_slotted, capacity):
    """Counts the choices ahead of each, and multiplies tokens by places."""
    index = jnp.arange(experts.shape[1], dtype="int32")
    # [s, t]: token t is served before token s.
    before = jnp.broadcast_to(
        index[:, None] > index, (experts.shape[0], *2 * index.shape)
    )
    if rank is not None:
        # NaN goes last, as in a sort: it must not take the place of another.
        rank = jnp.where(jnp.isnan(rank), jnp.inf, rank)
        own, others = rank[:, :, None], rank[:, None]
        before = (others < own) | ((others == own) & before)
    chosen = experts[..., None] == jnp.arange(num_experts, dtype="int32")
    one_hot = chosen.astype("bfloat16")
    ahead = _product("gst,gtke->gske", before.astype("bfloat16"), one_hot)
    # All first choices go before any second choice.
    number = jnp.sum(chosen, axis=1, dtype="float32", keepdims=True)
    ahead = ahead + jnp.cumsum(number, axis=2) - number
    position = jnp.sum(jnp.where(chosen, ahead, 0.0), axis=-1).astype("int32")

    place = position[..., None] == jnp.arange(capacity, dtype="int32")
    # Tokens are counted from 1, since an empty slot gets 0.
    digits = _digits(index + 1)
    tokens = one_hot[..., None, :num_slotted] * digits[:, None, :, None]
    high, low = jnp.moveaxis(
        _product("gskde,gskc->gdec", tokens, place.astype("bfloat16")), 1, 0
    )
    return (BASE * high + low).astype("int32") - 1, position


def invert(permutation: jax.Array, other: Callable) -> jax.Array:
    """`token_choice.invert`; `other` does the same on other platforms."""
    size = permutation.shape[0]
    if not isinstance(size, int) or size > MOST_ROWS:
        return other(permutation)
    return _invert(permutation, other)


@jit_by_platform(static_argnums=(1,))
def _invert(permutation, other):
    return by_platform(permutation, tpu=invert_by_matmul, default=other)


def invert_by_matmul(permutation):
    """Multiplies indices by one-hots of the row and the column where each belongs."""
    size = permutation.shape[0]
    row, column = jnp.divmod(permutation[:, None], LANES)
    is_row = row == jnp.arange(-(-size // LANES), dtype="int32")
    is_column = column == jnp.arange(LANES, dtype="int32")
    digits = _digits(jnp.arange(size, dtype="int32"))
    numbers = is_row.astype("bfloat16")[:, None] * digits[..., None]
    high, low = _product("ndr,nc->drc", numbers, is_column.astype("bfloat16"))
    return jnp.ravel(BASE * high + low)[:size].astype("int32")


def _digits(numbers):
    return jnp.stack(jnp.divmod(numbers, BASE), axis=1).astype("bfloat16")


def _product(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type="float32")
