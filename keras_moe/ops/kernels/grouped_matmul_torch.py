"""Grouped matmul on PyTorch: its grouped kernel where that is valid, else a loop."""

import torch


def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    # Keras computes the output's shape on the meta device.
    if rows.is_meta:
        return rows.new_empty((rows.shape[0], kernels.shape[2]))
    rows, kernels = rows.contiguous(), kernels.contiguous()
    if kernel_is_valid(rows, kernels):
        return with_kernel(rows, kernels, group_sizes)
    return with_loop(rows, kernels, group_sizes)


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


def with_kernel(rows, kernels, group_sizes):
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


def with_loop(rows, kernels, group_sizes):
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
