"""Many experts' matmuls and MLPs on rows that are sorted by expert, without capacity.

Axes: R rows, E experts, D hidden, H mlp.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe.ops.kernels.block_loops import Weights


def grouped_matmul(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """Multiplies each row by the kernel of its expert; the rows are sorted by expert.

    The first `group_sizes[0]` rows are expert 0's, the next `group_sizes[1]` rows
    expert 1's, and so on. No expert has a capacity: cost and memory grow with the
    number of rows, however they are distributed.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        kernels: (E, D, H), in the dtype of `rows`.
        group_sizes: (E,), int: the number of rows of each expert, with a sum of at
            most R.

    Returns:
        (R, H) in the dtype of `rows`. The rows after the last group belong to no
        expert: their outputs and gradients are zeros, whatever they hold.

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops import grouped_matmul
    >>> rows = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
    >>> kernels = np.array([[[1.0]], [[10.0]]], "float32")
    >>> outputs = grouped_matmul(rows, kernels, np.array([1, 2], "int32"))
    >>> np.array(outputs)[:, 0].tolist()
    [1.0, 20.0, 30.0, 0.0]
    """
    rows, kernels, group_sizes = _check_matmul(rows, kernels, group_sizes)
    if 0 in (*rows.shape, kernels.shape[2]):
        return ops.matmul(rows, kernels[0])  # zeros, with a gradient
    return _kernels().grouped_matmul(rows, kernels, group_sizes)


def grouped_matmul_reference(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """`grouped_matmul` by a matmul of all rows for every expert."""
    rows, kernels, group_sizes = _check_matmul(rows, kernels, group_sizes)
    ends = ops.cumsum(group_sizes)
    row = ops.arange(ops.shape(rows)[0], dtype="int32")
    total = 0.0
    for e in range(kernels.shape[0]):
        own = ops.logical_and(row >= ends[e] - group_sizes[e], row < ends[e])
        # Masked before the matmul: zero times an infinity would be NaN.
        inputs = ops.where(own[:, None], rows, ops.zeros_like(rows))
        total = total + ops.matmul(inputs, kernels[e])
    # Keras multiplies float64 in float32 on some backends.
    return ops.cast(total, rows.dtype)


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

    `output(activation(hidden(x)))`, or with a gate `output(activation(gate(x)) *
    hidden(x))`, where each layer is a `grouped_matmul`. Rows without an expert cost
    nothing. The gradient keeps what the activation reads, and recomputes the rest;
    without a gradient no (R, H) array is written.

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

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe.ops import grouped_mlp
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
    rows, group_sizes, weights = _check_mlp(
        rows,
        group_sizes,
        hidden_kernel=hidden_kernel,
        output_kernel=output_kernel,
        hidden_bias=hidden_bias,
        output_bias=output_bias,
        gate_kernel=gate_kernel,
        gate_bias=gate_bias,
    )
    if 0 in (*rows.shape, weights.hidden_kernel.shape[2]):
        return _mlp_reference(rows, group_sizes, weights, activation)
    return _kernels().grouped_mlp(rows, group_sizes, weights, activation)


def grouped_mlp_reference(
    rows: Any, group_sizes: Any, *, activation: Callable, **weights: Any
) -> Any:
    """`grouped_mlp` by a matmul of all rows for every expert."""
    weights = {**dict.fromkeys(Weights._fields), **weights}
    return _mlp_reference(*_check_mlp(rows, group_sizes, **weights), activation)


def _mlp_reference(rows, group_sizes, weights, activation):
    row = ops.arange(ops.shape(rows)[0], dtype="int32")[:, None]
    before = ops.cast(row >= ops.cumsum(group_sizes), "int32")
    owner = ops.sum(before, axis=1)
    num_experts = weights.hidden_kernel.shape[0]

    def linear(name, x):
        x = grouped_matmul_reference(x, getattr(weights, f"{name}_kernel"), group_sizes)
        biases = getattr(weights, f"{name}_bias")
        if biases is None:
            return x
        return x + ops.take(biases, ops.minimum(owner, num_experts - 1), axis=0)

    hidden = linear("hidden", rows)
    if weights.gate_kernel is None:
        hidden = activation(hidden)
    else:
        hidden = activation(linear("gate", rows)) * hidden
    outputs = linear("output", hidden)
    return ops.where(
        (owner < num_experts)[:, None], outputs, ops.zeros((), outputs.dtype)
    )


def _kernels():
    """The grouped kernels of the backend."""
    backend = keras.backend.backend()
    if backend == "jax":
        from keras_moe.ops.kernels import grouped_jax as kernels
    elif backend == "tensorflow":
        from keras_moe.ops.kernels import grouped_tensorflow as kernels
    else:
        from keras_moe.ops.kernels import grouped_torch as kernels
    return kernels


def _check_matmul(rows, kernels, group_sizes):
    """The arguments as tensors, if their shapes and dtypes fit."""
    rows, kernels = ops.convert_to_tensor(rows), ops.convert_to_tensor(kernels)
    group_sizes = ops.convert_to_tensor(group_sizes)
    shapes = tuple(tuple(x.shape) for x in (rows, kernels, group_sizes))
    rows_shape, kernels_shape, sizes_shape = shapes
    if (
        [len(shape) for shape in shapes] != [2, 3, 1]
        or rows_shape[1] != kernels_shape[1]
        or sizes_shape[0] != kernels_shape[0]
        or sizes_shape[0] == 0
    ):
        raise ValueError(
            "Expected rows of shape (rows, dim), kernels of shape (experts, dim, "
            "width) and group_sizes of shape (experts,), with at least one expert; "
            f"received: rows.shape={rows_shape}, kernels.shape={kernels_shape}, "
            f"group_sizes.shape={sizes_shape}"
        )
    group_sizes = _check_dtypes({"rows": rows, "kernels": kernels}, group_sizes)
    return rows, kernels, group_sizes


def _check_mlp(rows, group_sizes, **weights):
    """Rows, group sizes and `Weights` as tensors, if their shapes and dtypes fit."""
    if weights["gate_bias"] is not None and weights["gate_kernel"] is None:
        raise ValueError(
            "Expected a gate_kernel with gate_bias; received: gate_kernel=None"
        )
    group_sizes = ops.convert_to_tensor(group_sizes)
    tensors = {
        name: ops.convert_to_tensor(x)
        for name, x in {"rows": rows, **weights}.items()
        if x is not None
    }
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
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
    group_sizes = _check_dtypes(tensors, group_sizes)
    rows = tensors.pop("rows")
    return rows, group_sizes, Weights(**{name: tensors.get(name) for name in weights})


def _check_dtypes(floats, group_sizes):
    """The group sizes as int32, if the others have one float dtype."""
    standard = keras.backend.standardize_dtype
    dtypes = {name: standard(x.dtype) for name, x in floats.items()}
    if len(set(dtypes.values())) > 1 or "float" not in dtypes["rows"]:
        received = (f"{name}.dtype={dtype}" for name, dtype in dtypes.items())
        raise ValueError(
            "Expected rows, kernels and biases of one float dtype; "
            f"received: {', '.join(received)}"
        )
    if "int" not in standard(group_sizes.dtype):
        raise ValueError(
            "Expected group_sizes of an integer dtype; "
            f"received: group_sizes.dtype={standard(group_sizes.dtype)}"
        )
    return ops.cast(group_sizes, "int32")
