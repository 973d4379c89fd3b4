"""Many experts' whole MLPs on rows that are sorted by expert, without capacity.

Axes: R rows, E experts, D hidden, H mlp.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe.ops.grouped_matmul import grouped_matmul_reference
from keras_moe.ops.kernels.mlp_loops import Weights


def _checked(rows, group_sizes, hidden_kernel, output_kernel, **weights):
    """The arguments as tensors, if their shapes and dtypes fit."""
    if weights["gate_bias"] is not None and weights["gate_kernel"] is None:
        raise ValueError(
            "Expected a gate_kernel beside gate_bias; received: gate_kernel=None"
        )
    group_sizes = ops.convert_to_tensor(group_sizes)
    weights = {
        "hidden_kernel": hidden_kernel,
        "output_kernel": output_kernel,
        **weights,
    }
    floats = {
        name: ops.convert_to_tensor(x)
        for name, x in {"rows": rows, **weights}.items()
        if x is not None
    }
    shapes = {name: tuple(x.shape) for name, x in floats.items()}
    hidden = shapes["hidden_kernel"]
    num_experts, dim, width = hidden if len(hidden) == 3 else (0, None, None)
    expected = {
        "hidden_kernel": (num_experts, dim, width),
        "output_kernel": (num_experts, width, dim),
        "hidden_bias": (num_experts, width),
        "output_bias": (num_experts, dim),
        "gate_kernel": (num_experts, dim, width),
        "gate_bias": (num_experts, width),
    }
    fits = (
        num_experts > 0
        and tuple(group_sizes.shape) == (num_experts,)
        and len(shapes["rows"]) == 2
        and shapes["rows"][1] == dim
        and all(shapes[name] == expected[name] for name in shapes if name != "rows")
    )
    if not fits:
        received = [f"{name}.shape={shape}" for name, shape in shapes.items()]
        received.append(f"group_sizes.shape={tuple(group_sizes.shape)}")
        raise ValueError(
            "Expected rows of shape (rows, dim), hidden_kernel and gate_kernel of "
            "shape (experts, dim, width), output_kernel of shape (experts, width, "
            "dim), biases of shapes (experts, width) and, for the output, (experts, "
            "dim), and group_sizes of shape (experts,), with at least one expert; "
            f"received: {', '.join(received)}"
        )
    dtypes = {
        name: keras.backend.standardize_dtype(x.dtype) for name, x in floats.items()
    }
    if len(set(dtypes.values())) > 1 or "float" not in dtypes["rows"]:
        received = (f"{name}.dtype={dtype}" for name, dtype in dtypes.items())
        raise ValueError(
            "Expected rows, kernels and biases of one float dtype; "
            f"received: {', '.join(received)}"
        )
    sizes_dtype = keras.backend.standardize_dtype(group_sizes.dtype)
    if "int" not in sizes_dtype:
        raise ValueError(
            "Expected group_sizes of an integer dtype; "
            f"received: group_sizes.dtype={sizes_dtype}"
        )
    group_sizes = ops.cast(group_sizes, "int32")
    weights = {name: floats.get(name) for name in weights}
    return {"rows": floats["rows"], "group_sizes": group_sizes, **weights}


def grouped_mlp(
    rows: Any,
    group_sizes: Any,
    hidden_kernel: Any,
    output_kernel: Any,
    *,
    activation: Callable,
    hidden_bias: Any = None,
    output_bias: Any = None,
    gate_kernel: Any = None,
    gate_bias: Any = None,
) -> Any:
    """Puts each row through the MLP of its expert; the rows are sorted by expert.

    Two `grouped_matmul` with an activation between them, `output(activation(hidden(x))
    )`, or, with a gate, `output(activation(gate(x)) * hidden(x))`. Rows without an
    expert cost nothing, and no (R, H) array is written where nobody asks for a
    gradient. The gradient keeps what the activation reads, and computes the rest again.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        group_sizes: (E,), int: the number of rows of each expert, with a sum of at
            most R.
        hidden_kernel: (E, D, H), in the dtype of `rows`, as all weights are.
        output_kernel: (E, H, D).
        activation: function of a tensor (rows, H), which acts on each row alone. It
            closes over nothing that wants a gradient.
        hidden_bias: (E, H), or None.
        output_bias: (E, D), or None.
        gate_kernel: (E, D, H), or None for no gate.
        gate_bias: (E, H), or None.

    Returns:
        (R, D) in the dtype of `rows`. The rows after the last group belong to no
        expert: their outputs and gradients are zeros, whatever they hold.

    Raises:
        ValueError: if the shapes or the dtypes do not fit.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe.ops.grouped_mlp import grouped_mlp
    >>> rows = np.array([[1.0], [-2.0], [3.0], [4.0]], "float32")
    >>> hidden = np.array([[[1.0]], [[10.0]]], "float32")
    >>> outputs = grouped_mlp(
    ...     rows,
    ...     np.array([2, 1], "int32"),
    ...     hidden,
    ...     np.ones((2, 1, 1), "float32"),
    ...     activation=keras.activations.relu,
    ... )
    >>> np.array(outputs)[:, 0].tolist()
    [1.0, 0.0, 30.0, 0.0]
    """
    checked = _checked(
        rows,
        group_sizes,
        hidden_kernel,
        output_kernel,
        hidden_bias=hidden_bias,
        output_bias=output_bias,
        gate_kernel=gate_kernel,
        gate_bias=gate_bias,
    )
    backend = keras.backend.backend()
    if 0 in (*checked["rows"].shape, checked["hidden_kernel"].shape[2]):
        return _reference(activation=activation, **checked)
    if backend == "jax":
        from keras_moe.ops.kernels import grouped_mlp_jax as kernels
    elif backend == "tensorflow":
        from keras_moe.ops.kernels import grouped_mlp_tensorflow as kernels
    elif backend == "torch":
        from keras_moe.ops.kernels import grouped_mlp_torch as kernels
    else:
        return _reference(activation=activation, **checked)
    rows, group_sizes = checked.pop("rows"), checked.pop("group_sizes")
    return kernels.grouped_mlp(rows, group_sizes, Weights(**checked), activation)


def grouped_mlp_reference(
    rows: Any,
    group_sizes: Any,
    hidden_kernel: Any,
    output_kernel: Any,
    *,
    activation: Callable,
    hidden_bias: Any = None,
    output_bias: Any = None,
    gate_kernel: Any = None,
    gate_bias: Any = None,
) -> Any:
    """`grouped_mlp` by a matmul of all rows for every expert, for tests."""
    checked = _checked(
        rows,
        group_sizes,
        hidden_kernel,
        output_kernel,
        hidden_bias=hidden_bias,
        output_bias=output_bias,
        gate_kernel=gate_kernel,
        gate_bias=gate_bias,
    )
    return _reference(activation=activation, **checked)


def _reference(
    rows,
    group_sizes,
    hidden_kernel,
    output_kernel,
    activation,
    hidden_bias,
    output_bias,
    gate_kernel,
    gate_bias,
):
    row = ops.arange(ops.shape(rows)[0], dtype="int32")[:, None]
    before = ops.cast(row >= ops.cumsum(group_sizes), "int32")
    owner = ops.sum(before, axis=1)
    num_experts = hidden_kernel.shape[0]

    def linear(x, kernels, biases):
        x = grouped_matmul_reference(x, kernels, group_sizes)
        if biases is None:
            return x
        return x + ops.take(biases, ops.minimum(owner, num_experts - 1), axis=0)

    hidden = linear(rows, hidden_kernel, hidden_bias)
    if gate_kernel is None:
        hidden = activation(hidden)
    else:
        hidden = activation(linear(rows, gate_kernel, gate_bias)) * hidden
    outputs = linear(hidden, output_kernel, output_bias)
    return ops.where(
        (owner < num_experts)[:, None], outputs, ops.zeros((), outputs.dtype)
    )
