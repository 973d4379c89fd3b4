"""Grouped matmuls and MLPs by a matmul of all rows for every expert."""

from keras import ops


def grouped_matmul(rows, kernels, group_sizes):
    rows, kernels, group_sizes = map(
        ops.convert_to_tensor, (rows, kernels, group_sizes)
    )
    owner = _owners(rows, group_sizes)
    total = 0.0
    for e in range(kernels.shape[0]):
        # Masked before the matmul: zero times an infinity would be NaN.
        inputs = ops.where((owner == e)[:, None], rows, ops.zeros_like(rows))
        total = total + ops.matmul(inputs, kernels[e])
    # Keras multiplies float64 in float32 on some backends.
    return ops.cast(total, rows.dtype)


def grouped_mlp(
    rows, group_sizes, hidden_kernel, output_kernel, *, activation, **others
):
    owner = _owners(rows, group_sizes)[:, None]
    num_experts = hidden_kernel.shape[0]

    def linear(x, kernel, name):
        x = grouped_matmul(x, kernel, group_sizes)
        biases = others.get(name)
        if biases is None:
            return x
        index = ops.minimum(owner[:, 0], num_experts - 1)
        return x + ops.take(biases, index, axis=0)

    hidden = linear(rows, hidden_kernel, "hidden_bias")
    if others.get("gate_kernel") is None:
        hidden = activation(hidden)
    else:
        gate = linear(rows, others["gate_kernel"], "gate_bias")
        hidden = activation(gate) * hidden
    outputs = linear(hidden, output_kernel, "output_bias")
    return ops.where(owner < num_experts, outputs, ops.zeros((), outputs.dtype))


def _owners(rows, group_sizes):
    row = ops.arange(ops.shape(rows)[0], dtype="int32")[:, None]
    ends = ops.cumsum(ops.cast(group_sizes, "int32"))
    return ops.sum(ops.cast(row >= ends, "int32"), axis=1)
