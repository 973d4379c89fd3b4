"""Attention, tanh GELU, dense products and entmax on PyTorch, in few passes.

Attention can go when Keras's works with `torch.compile`, GELU when PyTorch's tanh form
is as fast as its erf form, and the dense product when Keras calls `addmm`. The last two
change last digits. Newton's steps of entmax are in place, as every eager pass counts.
"""

import math
from typing import Any

import torch

from keras_moe.ops._primitives import is_product, product

# Keras's number for pairs that do not attend: a token without any partner then gets the
# mean of all values, where minus infinity would give NaN.
MASKED = {torch.float16: -0.7 * 65500.0}
MASKED_OTHERS = -0.7 * 3.38953e38


def attend(query, key, value, scale, mask=None):
    """See `keras_moe.ops._nn.attend`."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if mask is not None:
        masked = MASKED.get(query.dtype, MASKED_OTHERS)
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = bias.masked_fill_(~mask, masked)
    outputs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )
    return outputs.transpose(1, 2)


def linear(inputs, kernel, bias, axes):
    """See `keras_moe.ops._nn.linear`."""
    shape = (*inputs.shape[: inputs.ndim - axes], *kernel.shape[axes:])
    kernel = kernel.reshape(math.prod(kernel.shape[:axes]), -1)
    rows = inputs.reshape(-1, kernel.shape[0])
    return torch.addmm(bias.reshape(-1), rows, kernel).reshape(shape)


def linear_is_valid(inputs, kernel, bias):
    """Whether `addmm` takes the tensors."""
    dtypes = {inputs.dtype, kernel.dtype, bias.dtype}
    # Keras multiplies float16 in float32 on a CPU.
    half_on_cpu = inputs.dtype == torch.float16 and inputs.device.type == "cpu"
    return len(dtypes) == 1 and inputs.dtype.is_floating_point and not half_on_cpu


# `0.5 (1 + tanh(u)) = sigmoid(2 u)`, with `2 u = x (SCALE + SCALE * CUBIC * x^2)`.
SCALE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_tanh(x):
    """See `keras_moe.ops._nn.gelu_tanh`."""
    # Other devices and compilers compute the whole form in one pass.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.nn.functional.gelu(x, approximate="tanh")
    return _GeluTanh.apply(x)


class _GeluTanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.full((), SCALE, dtype=exact.dtype)
        outputs = torch.addcmul(scale, exact, exact, value=SCALE * CUBIC)
        return outputs.mul_(exact).sigmoid_().mul_(exact).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *upstream):
        # PyTorch's own, which costs the same as the sigmoid's and has a gradient.
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(*upstream, x, approximate="tanh")

    # Elementwise, the function maps tangents as it maps gradients.
    jvp = backward


# Entmax.


def entmax(scores, alpha, power, steps):
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


def entmax_at(scores, top, tau, alpha, power):
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


def entmax_gradient_is_enough(gates):
    """Whether the gradient has no gradient of its own, and may work in place."""
    return not torch.is_grad_enabled() and gates.dtype == torch.float32


def entmax_gradient(gates, upstream, alpha):
    """See `keras_moe.ops.entmax.entmax_gradient_reference`."""
    slope = gates.sign() if alpha == 2.0 else _power(gates, 2.0 - alpha)
    changes = upstream * slope
    mean = changes.sum(dim=-1, keepdim=True).div_(slope.sum(dim=-1, keepdim=True))
    return changes.addcmul_(slope, mean, value=-1.0)


def _power(x: torch.Tensor, exponent: float) -> Any:
    if exponent == 0.5:
        return x.sqrt()
    return product(x, int(exponent)) if is_product(exponent) else x.pow(exponent)
