"""Attention, tanh GELU and dense products on PyTorch in fewer passes than Keras's.

Attention can go when Keras's works with `torch.compile`, GELU when PyTorch's tanh form
is as fast as its erf form, and the dense product when Keras calls `addmm`. The last two
change last digits.
"""

import math

import torch

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
    def backward(ctx, upstream):
        # PyTorch's own, which costs the same as the sigmoid's and has a gradient.
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(upstream, x, approximate="tanh")

    # Elementwise, the function maps tangents as it maps gradients.
    jvp = backward
