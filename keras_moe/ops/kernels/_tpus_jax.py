"""What TPUs compute by matmuls on JAX: queues of token choice, slots' rows, attention.

A TPU scatters and gathers numbers and adds scattered rows one at a time, and its sorts
and scatters take many seconds to compile. One-hots are exact in bfloat16, and so are
sums of them in float32.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, N slots of a
group, D hidden. In attention: B batch, N queries, M keys, h heads, d head size.
"""

import functools
from collections.abc import Callable

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
# Tokens of a group: the work of the slots' matmuls grows with its square.
MOST_TOKENS = 4096


def fill_slots(
    experts: jax.Array,
    rank: jax.Array | None,
    num_experts: int,
    num_slotted: int,
    capacity: int | jax.Array,
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


@jit_by_platform(static_argnums=(2, 3, 4))
def add_slots(rows, owners, num_tokens, dtype, other):
    """`_rows.add_slots`; `other` does the same on other platforms."""

    def scatter(rows, owners):
        return other(rows, owners, num_tokens).astype(dtype)

    def matmul(rows, owners):
        return by_matmul(rows, owners, num_tokens).astype(dtype)

    if dtype != "bfloat16" or num_tokens > MOST_TOKENS:
        return scatter(rows, owners)
    return by_platform(rows, owners, tpu=matmul, default=scatter)


def by_matmul(rows, owners, num_tokens):
    """Adds up rows that are rounded to bfloat16, in float32."""
    # Empty slots count 0 times: their rows, of experts' zeros, are finite.
    is_owner = owners[..., None] == jnp.arange(num_tokens, dtype="int32")
    return _product(
        "gns,gnd->gsd", is_owner.astype("bfloat16"), rows.astype("bfloat16")
    )


# Attention.


def attend(query, key, value, scale: float, mask=None) -> jax.Array:
    """See `keras_moe.ops._nn.attend`; keeps one bfloat16 array of weights."""
    return _attend(scale, query, key, value, mask)


# With w = exp(scale q k^T - max) in bfloat16 and s its sum over keys in float32, the
# output is o = (w v) / s. Keras keeps the softmax in float32 as well as in bfloat16;
# here the gradient needs w, s and o:
#
#     dv = w^T (do / s),   dz = w ((do / s) v^T - (do / s) . o),   dq = dz k scale
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, query, key, value, mask):
    return _forward(scale, query, key, value, mask)[0]


def _forward(scale, query, key, value, mask):
    logits = scale * _product("bnhd,bmhd->bhnm", query, key)
    if mask is not None:
        # As in JAX: finite, so that a row without any key is no NaN.
        logits = jnp.where(mask, logits, -0.7 * jnp.finfo("float32").max)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = weights.astype(value.dtype)
    total = jnp.sum(weights, axis=-1, dtype="float32").swapaxes(1, 2)[..., None]
    outputs = (_product("bhnm,bmhd->bnhd", weights, value) / total).astype(value.dtype)
    return outputs, (query, key, value, mask, weights, total, outputs)


def _backward(scale, residuals, upstream):
    query, key, value, mask, weights, total, outputs = residuals
    upstream = upstream / total
    along = jnp.sum(upstream * outputs, axis=-1).swapaxes(1, 2)[..., None]
    upstream = upstream.astype(value.dtype)
    dvalue = _product("bhnm,bnhd->bmhd", weights, upstream)
    dlogits = _product("bnhd,bmhd->bhnm", upstream, value) - along
    dlogits = (scale * weights * dlogits).astype(query.dtype)
    if mask is not None:
        # A row without any key has weights, and no gradient.
        dlogits = jnp.where(mask, dlogits, jnp.zeros_like(dlogits))
    dquery = _product("bhnm,bmhd->bnhd", dlogits, key)
    dkey = _product("bhnm,bnhd->bmhd", dlogits, query)
    gradients = (dquery, dkey, dvalue)
    return *(x.astype(value.dtype) for x in gradients), None


_attend.defvjp(_forward, _backward)


_product = functools.partial(jnp.einsum, preferred_element_type="float32")
