"""Many experts' matmuls and MLPs on rows that are sorted by expert, without capacity.

Axes: R rows, E experts, D hidden, H mlp.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe._checks import fits_shape
from keras_moe.ops.kernels._block_loops import Weights


def grouped_matmul(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """Multiplies each row by the kernel of its expert; the rows are sorted by expert.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        kernels: (E, D, H), in the dtype of `rows`.
        group_sizes: (E,), int: the rows of each expert, with a sum of at most R.

    Returns: (R, H) in the dtype of `rows`. The rows after the last group belong to no
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
    hidden(x))`, where each layer is a `grouped_matmul`. The gradient keeps what the
    activation reads, and recomputes the rest.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        group_sizes: (E,), int: the rows of each expert, with a sum of at most R.
        hidden_kernel: (E, D, H), in the dtype of `rows`, as all weights are.
        output_kernel: (E, H, D).
        activation: function of a tensor (rows, H), which acts on each row alone. It
            closes over nothing that wants a gradient.
        hidden_bias: (E, H), or None.
        output_bias: (E, D), or None.
        gate_kernel: (E, D, H), or None for no gate.
        gate_bias: (E, H), or None.

    Returns: (R, D) in the dtype of `rows`. The rows after the last group belong to no
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


def row_experts(group_sizes: Any, num_rows: Any) -> Any:
    """The expert of each row, for rows sorted by expert; the last for padding."""
    rows = ops.arange(num_rows, dtype="int32")
    experts = ops.searchsorted(ops.cumsum(group_sizes), rows, side="right")
    return ops.minimum(experts, group_sizes.shape[0] - 1)


def _kernels():
    """The grouped kernels of the backend."""
    backend = keras.backend.backend()
    if backend == "jax":
        from keras_moe.ops.kernels import _grouped_jax as kernels
    elif backend == "tensorflow":
        from keras_moe.ops.kernels import _grouped_tensorflow as kernels
    else:
        from keras_moe.ops.kernels import _grouped_torch as kernels
    return kernels


def _check_matmul(rows, kernels, group_sizes):
    """The arguments as tensors, if their shapes and dtypes fit."""
    tensors = {"rows": rows, "group_sizes": group_sizes, "kernels": kernels}
    tensors = _checked(tensors, "kernels", lambda *sizes: {"kernels": sizes})
    return tensors["rows"], tensors["kernels"], tensors["group_sizes"]


def _check_mlp(rows, group_sizes, **weights):
    """Rows, group sizes and `Weights` as tensors, if their shapes and dtypes fit."""

    def shapes(num_experts, dim, width):
        return {
            "hidden_kernel": (num_experts, dim, width),
            "output_kernel": (num_experts, width, dim),
            "hidden_bias": (num_experts, width),
            "output_bias": (num_experts, dim),
            "gate_kernel": (num_experts, dim, width),
            "gate_bias": (num_experts, width),
        }

    tensors = {"rows": rows, "group_sizes": group_sizes, **weights}
    tensors = _checked(tensors, "hidden_kernel", shapes)
    weights = Weights(**{name: tensors.get(name) for name in weights})
    return tensors["rows"], tensors["group_sizes"], weights


def _checked(tensors, first, shapes):
    """The given arguments as checked tensors; `shapes` expects them from `first`'s."""
    tensors = {
        name: ops.convert_to_tensor(x) for name, x in tensors.items() if x is not None
    }
    received = {name: tuple(x.shape) for name, x in tensors.items()}
    sizes = received[first] if len(received[first]) == 3 else (None, None, None)
    expected = {"rows": (None, sizes[1]), "group_sizes": sizes[:1], **shapes(*sizes)}
    expected = {name: expected[name] for name in tensors}
    if not all(fits_shape(received[name], expected[name]) for name in tensors):
        raise ValueError(
            f"Expected rows and weights of the shapes {expected}; received: {received}"
        )
    group_sizes = ops.cast(tensors.pop("group_sizes"), "int32")
    dtypes = {
        name: keras.backend.standardize_dtype(x.dtype) for name, x in tensors.items()
    }
    if len(set(dtypes.values())) > 1 or "float" not in dtypes["rows"]:
        raise ValueError(
            f"Expected rows and weights of one float dtype; received: {dtypes}"
        )
    return {**tensors, "group_sizes": group_sizes}
