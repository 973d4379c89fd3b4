"""A dense product with its bias on PyTorch, in one call."""

import math

import torch


def linear(inputs, kernel, bias, axes):
    """See `keras_moe.ops.linear`."""
    shape = (*inputs.shape[: inputs.ndim - axes], *kernel.shape[axes:])
    kernel = kernel.reshape(math.prod(kernel.shape[:axes]), -1)
    rows = inputs.reshape(-1, kernel.shape[0])
    return torch.addmm(bias.reshape(-1), rows, kernel).reshape(shape)


def is_valid(inputs, kernel, bias):
    """Whether `addmm` takes the tensors."""
    dtypes = {inputs.dtype, kernel.dtype, bias.dtype}
    # Keras multiplies float16 in float32 on a CPU.
    half_on_cpu = inputs.dtype == torch.float16 and inputs.device.type == "cpu"
    return len(dtypes) == 1 and inputs.dtype.is_floating_point and not half_on_cpu
