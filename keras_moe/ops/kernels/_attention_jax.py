"""Attention on TPUs that keeps one bfloat16 array of weights for its gradient.

Axes: B batch, N queries, M keys, h heads, d head size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def attend(query: Any, key: Any, value: Any, scale: float, mask: Any = None) -> Any:
    """See `keras_moe.ops._nn.attend`."""
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
