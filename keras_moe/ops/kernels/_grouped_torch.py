"""Grouped matmul and MLP on PyTorch: its grouped kernel, or a loop over experts.

Axes: R rows, E experts, D hidden, H mlp.
"""

import torch

# A product of fewer rows takes the time in which its kernel is read and packed.
SHORT = 32


def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    # Keras computes the output's shape on the meta device.
    if rows.is_meta:
        return rows.new_empty((rows.shape[0], kernels.shape[2]))
    if _is_one_node(rows):
        return _grouped_linear(rows, kernels, None, group_sizes)
    rows, kernels = rows.contiguous(), kernels.contiguous()
    if kernel_is_valid(rows, kernels):
        return matmul_with_kernel(rows, kernels, group_sizes)
    return matmul_with_loop(rows, kernels, group_sizes)


def kernel_is_valid(rows, kernels):
    """Whether `torch.nn.functional.grouped_mm` takes contiguous `rows`, `kernels`."""
    if not hasattr(torch.nn.functional, "grouped_mm"):  # before PyTorch 2.10
        return False
    dtype, device = rows.dtype, rows.device
    compiling = torch.compiler.is_compiling()
    # Every row of every matrix has to begin at a multiple of 16 bytes.
    if any(size == 0 or size * dtype.itemsize % 16 for size in kernels.shape[1:]):
        return False
    if not compiling and any(x.data_ptr() % 16 for x in (rows, kernels)):
        return False
    if device.type == "cuda":
        newer = torch.cuda.get_device_capability(device) >= (8, 0)
        return newer and dtype == torch.bfloat16
    # The compiler's shape function refuses float32.
    floats = (torch.bfloat16,) if compiling else (torch.bfloat16, torch.float32)
    return device.type == "cpu" and dtype in floats


def matmul_with_kernel(rows, kernels, group_sizes):
    ends = group_sizes.cumsum(0).to(torch.int32)
    # Outputs and gradients of the rows after the last group are left uninitialised.
    # Only on a CPU is it cheap to know that there are none.
    masked = rows.device.type != "cpu" or int(ends[-1]) < len(rows)
    if masked:
        own = torch.arange(len(rows), device=rows.device)[:, None] < ends[-1]
        rows = torch.where(own, rows, 0)
    outputs = torch.nn.functional.grouped_mm(rows, kernels, offs=ends)
    if outputs.requires_grad:
        # The kernel's gradient refuses an expanded or transposed cotangent.
        outputs.register_hook(torch.Tensor.contiguous)
    return torch.where(own, outputs, 0) if masked else outputs


def matmul_with_loop(rows, kernels, group_sizes):
    sizes = group_sizes.tolist()
    if torch.compiler.is_exporting():
        # The exported program reads them from data, and has to know their range.
        for size in sizes:
            torch._check(size >= 0)
            torch._check(size <= rows.shape[0])
        torch._check(sum(sizes) <= rows.shape[0])
    *groups, rest = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    # A kernel's gradient through unbind is one stack; through indexing it would be a
    # sum of tensors of the size of all kernels.
    outputs = [group @ kernel for group, kernel in zip(groups, kernels.unbind())]
    return torch.cat([*outputs, rest.new_zeros((rest.shape[0], kernels.shape[2]))])


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    # Keras computes the output's shape on the meta device.
    if rows.is_meta:
        return torch.empty_like(rows)
    inputs = (rows, weights.output_kernel, weights.output_bias)
    inputs = (*inputs, weights.hidden_kernel, weights.hidden_bias)
    if weights.gate_kernel is not None:
        inputs = (*inputs, weights.gate_kernel, weights.gate_bias)
    # A loop over sizes waits for an accelerator, and is no graph.
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return mlp_with_matmuls(activation, group_sizes, *inputs)
    return mlp_with_loop(activation, group_sizes, *inputs)


def mlp_with_matmuls(activation, group_sizes, rows, output_kernel, output_bias, *first):
    num_experts = output_kernel.shape[0]
    place = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    owner = torch.searchsorted(group_sizes.cumsum(0), place, right=True)
    own = (owner < num_experts)[:, None]
    owner = owner.clamp(max=num_experts - 1)

    def linear(x, kernels, biases):
        if _is_one_node(x):
            return _grouped_linear(x, kernels, biases, group_sizes)
        outputs = grouped_matmul(x, kernels, group_sizes)
        if biases is None:
            return outputs
        # On GPUs the gradient of an index adds the rows of an expert one by one.
        return outputs + torch.nn.functional.embedding(owner, biases)

    hidden = [linear(rows, *layer) for layer in _pairs(first)]
    outputs = linear(_between(activation, hidden), output_kernel, output_bias)
    return torch.where(own, outputs, 0)


def mlp_with_loop(activation, group_sizes, *inputs):
    sizes = group_sizes.tolist()
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs
    ):
        return _Loop.apply(activation, sizes, *inputs)
    # Where a loop would take longer than a batch, which has rows of no expert.
    longest = max(sizes)
    if 0 < longest <= SHORT and len(sizes) * longest <= 3 * sum(sizes):
        return _in_one_batch(activation, sizes, *inputs)
    return _forward(activation, sizes, *inputs)


def _in_one_batch(activation, sizes, rows, output_kernel, output_bias, *first):
    """The outputs of few rows, by batched products of as many rows for each expert."""
    num_experts, longest = len(sizes), max(sizes)
    places, start = [], 0
    for size in sizes:
        places += range(start, start + size)
        start += longest
    places = torch.tensor(places)
    inputs = rows.new_zeros((num_experts * longest, rows.shape[1]))
    inputs[places] = rows[: len(places)]
    inputs = inputs.view(num_experts, longest, -1)

    def linear(x, kernels, biases):
        if biases is None:
            return torch.bmm(x, kernels)
        return torch.baddbmm(biases[:, None], x, kernels)

    hidden = [linear(inputs, *layer) for layer in _pairs(first)]
    hidden = _between(activation, hidden)
    results = linear(hidden, output_kernel, output_bias).flatten(0, 1)
    outputs = torch.empty_like(rows, memory_format=torch.contiguous_format)
    torch.index_select(results, 0, places, out=outputs[: len(places)])
    outputs[len(places) :].zero_()
    return outputs


def _forward(activation, sizes, rows, output_kernel, output_bias, *first, kept=None):
    """The outputs; `kept` is an (R, H) tensor for what each first layer gives."""
    outputs = torch.empty_like(rows, memory_format=torch.contiguous_format)
    layers = _pairs(first)
    kept = kept or [None] * len(layers)
    for expert, own in _groups(sizes):
        # The hidden rows of one expert stay in a cache.
        hidden = [
            _linear(rows[own], kernel, bias, expert, None if out is None else out[own])
            for (kernel, bias), out in zip(layers, kept)
        ]
        hidden = _between(activation, hidden)
        _linear(hidden, output_kernel, output_bias, expert, outputs[own])
    outputs[sum(sizes) :].zero_()
    return outputs


class _Loop(torch.autograd.Function):
    """The loop with a gradient that keeps what the activation reads."""

    @staticmethod
    def forward(ctx, activation, sizes, rows, *weights):
        num_rows, width = sum(sizes), weights[0].shape[1]
        kept = [rows.new_empty((num_rows, width)) for _ in _pairs(weights[2:])]
        outputs = _forward(activation, sizes, rows, *weights, kept=kept)
        ctx.activation, ctx.sizes = activation, sizes
        ctx.save_for_backward(rows, *weights, *kept)
        return outputs

    @staticmethod
    def backward(ctx, upstream):
        # Once: a checkpoint gives what it has computed again a single time.
        saved, num_inputs = ctx.saved_tensors, len(ctx.needs_input_grad) - 2
        inputs, kept = saved[:num_inputs], saved[num_inputs:]
        if torch.is_grad_enabled() and any(ctx.sizes):
            return None, None, *_gradients_with_gradients(ctx, inputs, upstream)
        rows, output_kernel, _, *first = inputs
        # Every entry is written below.
        gradients = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if needed
            else None
            for x, needed in zip(inputs, ctx.needs_input_grad[2:])
        ]
        rows_gradient, *output_gradients = gradients[:3]
        first_gradients = _pairs(gradients[3:])
        for expert, own in _groups(ctx.sizes):
            hidden = [x[own].detach().requires_grad_() for x in kept]
            with torch.enable_grad():
                between = _between(ctx.activation, hidden)
            change = upstream[own]
            _write_gradients(between.detach(), change, expert, *output_gradients)
            change = torch.mm(change, output_kernel[expert].T)
            changes = torch.autograd.grad(between, hidden, change)
            for change, pair in zip(changes, first_gradients):
                _write_gradients(rows[own], change, expert, *pair)
            if rows_gradient is not None:
                kernels = [kernel[expert].T for kernel, _ in _pairs(first)]
                total = torch.mm(changes[0], kernels[0], out=rows_gradient[own])
                for change, kernel in zip(changes[1:], kernels[1:]):
                    total.addmm_(change, kernel)
        if rows_gradient is not None:
            rows_gradient[sum(ctx.sizes) :].zero_()
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                for gradient in gradients[1:]:
                    if gradient is not None:
                        gradient[expert].zero_()
        return None, None, *gradients


def _gradients_with_gradients(ctx, inputs, upstream):
    """The gradients in the inputs, as functions that are differentiated again."""
    rows, output_kernel, output_bias, *first = inputs
    outputs = []
    for expert, own in _groups(ctx.sizes):
        hidden = [_linear(rows[own], *pair, expert) for pair in _pairs(first)]
        hidden = _between(ctx.activation, hidden)
        outputs.append(_linear(hidden, output_kernel, output_bias, expert))
    needed = ctx.needs_input_grad[2:]
    gradients = torch.autograd.grad(
        torch.cat(outputs),
        [x for x, is_needed in zip(inputs, needed) if is_needed],
        upstream[: sum(ctx.sizes)],
        create_graph=True,
    )
    gradients = iter(gradients)
    return [next(gradients) if is_needed else None for is_needed in needed]


# In a compiled graph, the loop over experts is one node of it, since its sizes are
# data. What is around it, such as the activation, is the compiler's.


def _is_one_node(rows):
    """Whether a loop is recorded in a graph that need not run anywhere else."""
    is_compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    # GPUs have a kernel for bfloat16, which does not wait for the sizes.
    return is_compiling and (rows.device.type == "cpu" or rows.dtype != torch.bfloat16)


@torch.library.custom_op("keras_moe::grouped_linear", mutates_args=())
def _grouped_linear(
    rows: torch.Tensor,
    kernels: torch.Tensor,
    biases: torch.Tensor | None,
    group_sizes: torch.Tensor,
) -> torch.Tensor:
    sizes = group_sizes.tolist()
    outputs = rows.new_empty((rows.shape[0], kernels.shape[2]))
    for expert, own in _groups(sizes):
        _linear(rows[own], kernels, biases, expert, outputs[own])
    outputs[sum(sizes) :].zero_()
    return outputs


@torch.library.custom_op("keras_moe::grouped_linear_slopes", mutates_args=())
def _grouped_linear_slopes(
    rows: torch.Tensor, upstream: torch.Tensor, group_sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (len(group_sizes), rows.shape[1], upstream.shape[1])
    kernels, biases = rows.new_zeros(shapes), rows.new_zeros(shapes[::2])
    for expert, own in _groups(group_sizes.tolist()):
        _write_gradients(rows[own], upstream[own], expert, kernels, biases)
    return kernels, biases


@_grouped_linear.register_fake
def _(rows, kernels, biases, group_sizes):
    return rows.new_empty((rows.shape[0], kernels.shape[2]))


@_grouped_linear_slopes.register_fake
def _(rows, upstream, group_sizes):
    shape = (group_sizes.shape[0], rows.shape[1], upstream.shape[1])
    return rows.new_empty(shape), rows.new_empty(shape[::2])


def _keep(ctx, inputs, output):
    rows, kernels, biases, group_sizes = inputs
    ctx.has_biases = biases is not None
    ctx.save_for_backward(rows, kernels, group_sizes)


def _linear_gradients(ctx, upstream):
    rows, kernels, group_sizes = ctx.saved_tensors
    slopes = _grouped_linear_slopes(rows, upstream, group_sizes)
    change = _grouped_linear(upstream, kernels.transpose(1, 2), None, group_sizes)
    return change, slopes[0], slopes[1] if ctx.has_biases else None, None


_grouped_linear.register_autograd(_linear_gradients, setup_context=_keep)


def _groups(sizes):
    """The experts that have rows, and the slices of these."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _pairs(first):
    """A kernel and a bias for each layer before the activation."""
    return list(zip(first[::2], first[1::2]))


def _between(activation, hidden):
    """The inputs of the output layer from those of the activation."""
    if len(hidden) == 1:
        return activation(hidden[0])
    hidden, gate = hidden
    return activation(gate) * hidden


def _linear(x, kernel, bias, expert, out=None):
    if bias is None:
        return torch.mm(x, kernel[expert], out=out)
    return torch.addmm(bias[expert], x, kernel[expert], out=out)


def _write_gradients(x, change, expert, kernel_gradient, bias_gradient):
    if kernel_gradient is not None:
        torch.mm(x.T, change, out=kernel_gradient[expert])
    if bias_gradient is not None:
        torch.sum(change, 0, out=bias_gradient[expert])
