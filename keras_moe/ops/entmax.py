"""alpha-entmax: between softmax, which is dense, and sparsemax.

With q = 1 / (alpha - 1) and z = (alpha - 1) * (logits - max(logits)),

    p_i = max(z_i - tau, 0) ** q,    with tau so that the p_i sum to 1.

Axes: N logits, the last axis.
"""

from typing import NamedTuple

import keras
from keras import ops

from keras_moe._checks import check_number
from keras_moe._types import Tensor
from keras_moe.ops._primitives import custom_gradient, max_along, real_power

# Newton's steps up to an alpha, for at most 512 logits and for more; each step doubles
# the digits near the threshold. Many logits may crowd just below it, where they weigh
# the less the smaller alpha is. Below 1.5, 40,000 inputs made to be hard, with 16,384
# logits for the second number, have gates within 2e-6 of the exact ones.
_STEPS = (
    (1.1, 3, 4),
    (1.25, 4, 6),
    (1.35, 5, 7),
    (1.45, 6, 9),
    (1.5, 6, 10),
    (2.0, 10, 20),
)
_MANY = 512


def entmax(logits: Tensor, alpha: float = 1.5, axis: int = -1) -> Tensor:
    """The alpha-entmax of logits: a distribution with zeros and an exact gradient.

    `p_i = max((alpha - 1) z_i - tau, 0) ** (1 / (alpha - 1))` with the threshold tau at
    which it sums to 1. At alpha = 2 it is sparsemax; softmax is the limit at 1.

    Args:
        logits: float tensor; half precision is computed in float32.
        alpha: alpha, above 1 and at most 2.
        axis: axis over which the result sums to 1.

    Reference: *Sparse Sequence-to-Sequence Models* (Peters, Niculae, Martins).

    Example:

    >>> from keras_moe.ops import entmax
    >>> np.array(entmax(np.array([1.0, 1.0, -1.0], "float32"))).tolist()
    [0.5, 0.5, 0.0]
    """
    alpha = check_number("alpha", alpha)
    if not 1 < alpha <= 2:
        raise ValueError(f"Expected 1 < alpha <= 2; received: alpha={alpha}")
    logits = ops.convert_to_tensor(logits)
    dtype = logits.dtype
    scores = ops.moveaxis(ops.cast(logits, "float32"), axis, -1)

    def forward(scores):
        gates, *_ = solve(scores, alpha)
        return gates, (gates,)

    def backward(kept, upstream):
        return (entmax_gradient(kept[0], upstream, alpha),)

    gates = custom_gradient(forward, backward, scores)
    return ops.cast(ops.moveaxis(gates, -1, axis), dtype)


class Source(NamedTuple):
    """Scores (..., N), their maximum and tau (..., 1), which give 1.5-entmax again."""

    scores: Tensor
    top: Tensor
    tau: Tensor


def entmax15_and_source(scores: Tensor) -> tuple[Tensor, Source]:
    """1.5-entmax over the last axis, whose gradient keeps the scores, and no gates."""

    # It saves memory where scores are kept anyway: tau makes recomputing gates cheap.
    def forward(scores):
        gates, top, tau = solve(scores, 1.5)
        return (gates, top, tau), (scores, top, tau)

    def backward(kept, upstream, *_):
        return (entmax_gradient(gates_again(Source(*kept)), upstream, 1.5),)

    scores = ops.convert_to_tensor(scores)
    gates, top, tau = custom_gradient(forward, backward, scores)
    return gates, Source(scores, top, tau)


def gates_again(source: Source) -> Tensor:
    """The gates of a source, with the gradient of entmax."""

    def forward(scores, top, tau):
        gates = gates_at(scores, top, tau, 1.5)
        return gates, (gates,)

    def backward(kept, upstream):
        return entmax_gradient(kept[0], upstream, 1.5), None, None

    return custom_gradient(forward, backward, *source)


def solve(scores: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of the last axis, the largest score, and tau; without a gradient."""
    few, many = next(steps for limit, *steps in _STEPS if alpha <= limit)
    count = scores.shape[-1]
    steps = few if count is not None and count <= _MANY else many
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import _nn_torch

        scores = ops.convert_to_tensor(scores)
        return _nn_torch.entmax(scores, alpha, entmax_power(alpha), steps)
    return solve_reference(scores, alpha, steps)


def entmax_power(alpha: float) -> float:
    """q = 1 / (alpha - 1), rounded if it is an integer but for rounding."""
    power = 1.0 / (alpha - 1.0)
    return float(round(power)) if abs(power - round(power)) < 1e-9 else power


def solve_reference(
    scores: Tensor, alpha: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`solve` by `keras.ops`, in a given number of Newton's steps."""
    # |max(z - tau, 0)|_q = 1 is convex in tau: steps from below cannot overshoot.
    scores, power = ops.convert_to_tensor(scores), entmax_power(alpha)
    # Only differences count, and the largest becomes 0: nothing overflows.
    top = max_along(scores, axis=-1, keepdims=True)
    scaled = (alpha - 1.0) * (scores - top)
    # The largest alone would give 1 at this threshold, so the sum is at least 1.
    tau = -ops.ones_like(top)
    for _ in range(steps):
        # The sum is convex: a step back is rounding, from which the next one would
        # start again.
        step = _newton_step(ops.maximum(scaled - tau, 0.0), tau, power)
        tau = tau + ops.maximum(step, 0.0)
    return gates_at(scores, top, tau, alpha), top, tau


def gates_at(scores: Tensor, top: Tensor, tau: Tensor, alpha: float) -> Tensor:
    """The entmax at a threshold that `solve` found."""
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import _nn_torch

        scores, top, tau = map(ops.convert_to_tensor, (scores, top, tau))
        if _nn_torch.entmax_gradient_is_enough(scores):
            power = entmax_power(alpha)
            return _nn_torch.entmax_at(scores, top, tau, alpha, power)
    rest = ops.maximum((alpha - 1.0) * (scores - top) - tau, 0.0)
    gates = real_power(rest, entmax_power(alpha))
    return gates / ops.sum(gates, axis=-1, keepdims=True)


def entmax_gradient(gates: Tensor, upstream: Tensor, alpha: float) -> Tensor:
    """The gradient in the logits of `entmax` over the last axis."""
    if keras.backend.backend() == "torch":
        from keras_moe.ops.kernels import _nn_torch

        gates, upstream = map(ops.convert_to_tensor, (gates, upstream))
        if _nn_torch.entmax_gradient_is_enough(gates):
            return _nn_torch.entmax_gradient(gates, upstream, alpha)
    return entmax_gradient_reference(gates, upstream, alpha)


def entmax_gradient_reference(gates: Tensor, upstream: Tensor, alpha: float) -> Tensor:
    """`entmax_gradient` by `keras.ops`, which has a gradient itself."""
    gates, upstream = map(ops.convert_to_tensor, (gates, upstream))
    # p ** (2 - alpha) of the chosen entries.
    chosen = gates > 0
    slope = real_power(ops.where(chosen, gates, 1.0), 2.0 - alpha)
    slope = ops.where(chosen, slope, 0.0)
    mean = ops.sum(upstream * slope, axis=-1, keepdims=True)
    mean = mean / ops.sum(slope, axis=-1, keepdims=True)
    return slope * (upstream - mean)


def _newton_step(rest, tau, power):
    """The rise of the threshold: (|rest|_q - 1) / -(d|rest|_q / d tau)."""
    if power == 2:
        # Two sums of numbers of at most 1 whose squares sum to at least 1.
        total = ops.sum(rest * rest, axis=-1, keepdims=True)
        return (total - ops.sqrt(total)) / ops.sum(rest, axis=-1, keepdims=True)
    if power == 1:
        # The norm is a sum, and its slope the number of those above the threshold.
        chosen = ops.sum(ops.sign(rest), axis=-1, keepdims=True)
        return (ops.sum(rest, axis=-1, keepdims=True) - 1.0) / chosen
    # Shares of the largest, 0 - tau: a high power of the others would vanish beside it.
    share = rest * (-1.0 / tau)
    # share ** (q - 1): one power for the norm and its slope.
    weight = real_power(share, power - 1.0)
    total = ops.sum(weight * share, axis=-1, keepdims=True)
    norm = -tau * real_power(total, 1.0 / power)
    # sum(share ** (q - 1)) / total ** ((q - 1) / q): the norm's slope.
    slope = ops.sum(weight, axis=-1, keepdims=True)
    slope = slope / real_power(total, (power - 1.0) / power)
    return (norm - 1.0) / slope
