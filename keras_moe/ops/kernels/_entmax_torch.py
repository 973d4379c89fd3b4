"""alpha-entmax on PyTorch: Newton's steps in place, as every eager pass counts."""

import torch

from keras_moe.ops._primitives import is_product, product


def solve(scores, alpha, power, steps):
    """See `keras_moe.ops.entmax.solve_reference`; `power` is q."""
    # An empty batch has no largest entry, and nothing to find.
    reduce = torch.amax if scores.numel() else torch.sum
    top = reduce(scores, dim=-1, keepdim=True)
    rest = torch.sub(scores, top)
    tau = torch.full_like(top, -1.0)
    # max(z - tau, 0) at the first threshold; a later one is a step higher.
    rest.mul_(alpha - 1.0).add_(1.0).relu_()
    for _ in range(steps):
        # A step back, which only rounding makes, would raise entries from zero.
        step = _newton_step(rest, tau, power).relu_()
        tau.add_(step)
        rest.sub_(step).relu_()
    return _shares(rest, power), top, tau


def gates_at(scores, top, tau, alpha, power):
    """See `keras_moe.ops.entmax.gates_at`."""
    rest = torch.sub(scores, top).mul_(alpha - 1.0).sub_(tau).relu_()
    return _shares(rest, power)


def _shares(rest, power):
    if power == 2:
        rest.square_()
    elif power != 1:
        rest = _power(rest, power)
    return rest.div_(rest.sum(dim=-1, keepdim=True))


def _newton_step(rest, tau, power):
    if power == 2:
        # By far the fastest sums of squares and of numbers on a CPU.
        norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        return norm.square().sub_(norm).div_(rest.sum(dim=-1, keepdim=True))
    if power == 1:
        chosen = rest.sign().sum(dim=-1, keepdim=True)
        return rest.sum(dim=-1, keepdim=True).sub_(1.0).div_(chosen)
    share = rest / -tau
    weight = _power(share, power - 1.0)
    total = share.mul_(weight).sum(dim=-1, keepdim=True)
    slope = weight.sum(dim=-1, keepdim=True) / total.pow((power - 1.0) / power)
    return (total.pow(1.0 / power).mul_(-tau)).sub_(1.0).div_(slope)


def gradient_is_enough(gates):
    """Whether nobody differentiates the gradient, which then may work in place."""
    return not torch.is_grad_enabled() and gates.dtype == torch.float32


def gradient(gates, upstream, alpha):
    """See `keras_moe.ops.entmax.entmax_gradient_reference`."""
    slope = gates.sign() if alpha == 2.0 else _power(gates, 2.0 - alpha)
    changes = upstream * slope
    mean = changes.sum(dim=-1, keepdim=True).div_(slope.sum(dim=-1, keepdim=True))
    return changes.addcmul_(slope, mean, value=-1.0)


def _power(x, exponent):
    if exponent == 0.5:
        return x.sqrt()
    return product(x, int(exponent)) if is_product(exponent) else x.pow(exponent)
