"""GELU's tanh form on PyTorch by a sigmoid, which is cheap on a CPU.

`0.5 (1 + tanh(u)) = sigmoid(2 u)`, with `2 u = x (SCALE + SCALE * CUBIC * x^2)`.
"""

import math

import torch

SCALE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_tanh(x):
    """See `keras_moe.ops.gelu_tanh`."""
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
