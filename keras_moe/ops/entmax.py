"""alpha-entmax: between softmax, which is dense, and sparsemax."""

import numbers
from typing import Any

from keras import ops

from keras_moe.ops.empty import max_along
from keras_moe.ops.own_gradient import with_own_gradient

# Newton's steps by alpha, and for other alphas; each step doubles the digits near the
# threshold. Beyond 512 logits more of them may crowd just below it, which takes longer.
_STEPS, _OTHER_STEPS = {1.5: 6}, 10
_MANY, _STEPS_FOR_MANY, _OTHER_STEPS_FOR_MANY = 512, {1.5: 10}, 20


def entmax(logits: Any, alpha: float = 1.5, axis: int = -1) -> Any:
    """The alpha-entmax of logits: a distribution with zeros.

    `p_i = max((alpha - 1) z_i - tau, 0) ** (1 / (alpha - 1))` with the threshold tau
    at which it sums to 1. At alpha = 2 it is sparsemax; softmax is the limit at 1. The
    threshold is found by Newton's steps on the convex norm
    `|max((alpha - 1) z - tau, 0)|_q = 1`, q = 1 / (alpha - 1), from below, where they
    cannot overshoot. The gradient is exact.

    Args:
        logits: float tensor; half precision is computed in float32.
        alpha: alpha, above 1 and at most 2.
        axis: axis over which the result sums to 1.

    Returns:
        A tensor like `logits`.

    Raises:
        ValueError: if `alpha` is out of range.

    Reference:
        *Sparse Sequence-to-Sequence Models* (Peters, Niculae, Martins); muMoE's expert
        coefficients.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops import entmax
    >>> np.array(entmax(np.array([1.0, 1.0, -1.0], "float32"))).tolist()
    [0.5, 0.5, 0.0]
    """
    is_number = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
    if not is_number or not 1 < alpha <= 2:
        raise ValueError(f"Expected 1 < alpha <= 2; received: alpha={alpha!r}")
    alpha = float(alpha)
    logits = ops.convert_to_tensor(logits)
    dtype = logits.dtype
    scores = ops.moveaxis(ops.cast(logits, "float32"), axis, -1)
    gates = _entmax(scores, alpha)
    return ops.cast(ops.moveaxis(gates, -1, axis), dtype)


def _entmax(scores, alpha):
    def forward(scores):
        gates = _solve(scores, alpha)
        return gates, (gates,)

    def backward(kept, upstream):
        (gates,) = kept
        # p ** (2 - alpha) of the chosen entries.
        chosen = gates > 0
        slope = _power(ops.where(chosen, gates, 1.0), 2.0 - alpha)
        slope = ops.where(chosen, slope, 0.0)
        mean = ops.sum(upstream * slope, axis=-1, keepdims=True)
        mean = mean / ops.sum(slope, axis=-1, keepdims=True)
        return (slope * (upstream - mean),)

    return with_own_gradient(forward, backward, scores)


def _solve(scores, alpha):
    power = 1.0 / (alpha - 1.0)
    # Only differences count, and the largest becomes 0: nothing overflows.
    top = max_along(scores, axis=-1, keepdims=True)
    scaled = (alpha - 1.0) * (scores - top)
    # The largest alone would give 1 at this threshold, so the sum is at least 1.
    tau = -ops.ones_like(top)
    for _ in range(_steps(alpha, scores.shape[-1])):
        tau = tau + _newton_step(ops.maximum(scaled - tau, 0.0), power)
    gates = _power(ops.maximum(scaled - tau, 0.0), power)
    return gates / ops.sum(gates, axis=-1, keepdims=True)


def _steps(alpha, count):
    if count is not None and count <= _MANY:
        return _STEPS.get(alpha, _OTHER_STEPS)
    return _STEPS_FOR_MANY.get(alpha, _OTHER_STEPS_FOR_MANY)


def _newton_step(rest, power):
    """The rise of the threshold: (|rest|_q - 1) / -(d|rest|_q / d tau)."""
    if power == 2:
        # Two sums of numbers of at most 1 whose squares sum to at least 1.
        total = ops.sum(rest * rest, axis=-1, keepdims=True)
        return (total - ops.sqrt(total)) / ops.sum(rest, axis=-1, keepdims=True)
    # Shares of the largest: a high power of the others would vanish beside it.
    top = max_along(rest, axis=-1, keepdims=True)
    share = rest / top
    total = ops.sum(_power(share, power), axis=-1, keepdims=True)
    norm = top * _power(total, 1.0 / power)
    # sum(share ** (q - 1)) / total ** ((q - 1) / q): the norm's slope.
    counted = ops.where(share > 0, _power(share, power - 1.0), 0.0)
    slope = ops.sum(counted, axis=-1, keepdims=True)
    slope = slope / _power(total, (power - 1.0) / power)
    return (norm - 1.0) / slope


def _power(x, exponent):
    """x ** exponent for x of at least 0, by a cheaper operation where there is one."""
    if exponent == 0:
        return ops.ones_like(x)
    if exponent == 0.5:
        return ops.sqrt(x)
    if exponent == 1:
        return x
    if exponent == 2:
        return x * x
    return ops.power(x, exponent)
