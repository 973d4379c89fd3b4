"""Grouped MLP on PyTorch: two grouped matmuls, with the activation between them."""

import torch

from keras_moe.ops.kernels.grouped_matmul_torch import grouped_matmul


def grouped_mlp(
    rows,
    group_sizes,
    hidden_kernel,
    output_kernel,
    activation,
    hidden_bias=None,
    output_bias=None,
    gate_kernel=None,
    gate_bias=None,
):
    """See `keras_moe.ops.grouped_mlp`."""
    place = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    owner = torch.searchsorted(group_sizes.cumsum(0), place, right=True)
    own = (owner < hidden_kernel.shape[0])[:, None]
    owner = owner.clamp(max=hidden_kernel.shape[0] - 1)

    def linear(x, kernels, biases):
        outputs = grouped_matmul(x, kernels, group_sizes)
        return outputs if biases is None else outputs + biases[owner]

    hidden = linear(rows, hidden_kernel, hidden_bias)
    if gate_kernel is None:
        hidden = activation(hidden)
    else:
        hidden = activation(linear(rows, gate_kernel, gate_bias)) * hidden
    return torch.where(own, linear(hidden, output_kernel, output_bias), 0)
