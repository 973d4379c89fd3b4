"""Many experts' matmuls and MLPs on rows that are sorted by expert, without capacity.

Axes: R rows, E experts, D hidden, H mlp.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe._checks import fits_shape, unfit
from keras_moe._types import Size, Tensor
from keras_moe.ops.kernels._block_loops import Weights


def grouped_matmul(rows: Tensor, kernels: Tensor, group_sizes: Tensor) -> Tensor:
    """Multiplies each row by the kernel of its expert; the rows are sorted by expert.

    Args:
        rows: (R, D), any float dtype. On TensorFlow, R may be unknown in a graph.
        kernels: (E, D, H), in the dtype of `rows`.
        group_sizes: (E,), int: the rows of each expert, with a sum of at most R.

    Returns: (R, H) in the dtype of `rows`. The rows after the last group belong to no
    expert: their outputs and gradients are zeros, whatever they hold.

    Example:

    >>> from keras_moe.ops import grouped_matmul
    >>> rows = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
    >>> kernels = np.array([[[1.0]], [[10.0]]], "float32")
    >>> outputs = grouped_matmul(rows, kernels, np.array([1, 2], "int32"))
    >>> np.array(outputs)[:, 0].tolist()
    [1.0, 20.0, 30.0, 0.0]
    """
    inputs = {"rows": rows, "kernels": kernels, "group_sizes": group_sizes}
    inputs = _checked(inputs)
    rows, kernels = inputs["rows"], inputs["kernels"]
    if 0 in (*rows.shape, kernels.shape[2]):
        return ops.matmul(rows, kernels[0])  # zeros, with a gradient
    return _kernels().grouped_matmul(**inputs)


def grouped_mlp(
    rows: Tensor,
    group_sizes: Tensor,
    hidden_kernel: Tensor,
    output_kernel: Tensor,
    *,
    activation: Callable,
    hidden_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
    gate_kernel: Tensor | None = None,
    gate_bias: Tensor | None = None,
) -> Tensor:
    """Puts each row through the MLP of its expert; the rows are sorted by expert.

    `output(activation(hidden(x)))`, or with a gate `output(activation(gate(x)) *
    hidden(x))`, where each layer is a `grouped_matmul`. The gradient keeps what the
    activation reads, and recomputes the rest.

    Args:
        rows: (R, D), as in `grouped_matmul`.
        group_sizes: (E,), likewise.
        hidden_kernel: (E, D, H), in the dtype of `rows`, as all weights are.
        output_kernel: (E, H, D).
        activation: function of a tensor (rows, H), which acts on each row alone. It
            closes over nothing that wants a gradient.
        hidden_bias: (E, H), or None.
        output_bias: (E, D), or None.
        gate_kernel: (E, D, H), or None for no gate.
        gate_bias: (E, H), or None.

    Returns: (R, D) in the dtype of `rows`, zeros as in `grouped_matmul`.

    Example:

    >>> import keras
    >>> from keras_moe.ops import grouped_mlp
    >>> rows = np.array([[1.0], [-2.0], [3.0], [4.0]], "float32")
    >>> hidden = np.array([[[1.0]], [[10.0]]], "float32")
    >>> output, sizes = np.ones((2, 1, 1), "float32"), np.array([2, 1], "int32")
    >>> relu = keras.activations.relu
    >>> outputs = grouped_mlp(rows, sizes, hidden, output, activation=relu)
    >>> np.array(outputs)[:, 0].tolist()
    [1.0, 0.0, 30.0, 0.0]
    """
    weights = Weights(
        hidden_kernel, output_kernel, hidden_bias, output_bias, gate_kernel, gate_bias
    )
    inputs = {"rows": rows, "group_sizes": group_sizes, **weights._asdict()}
    inputs = _checked(inputs)
    rows, group_sizes = inputs.pop("rows"), inputs.pop("group_sizes")
    weights = Weights._make(map(inputs.get, Weights._fields))
    if rows.shape[0] == 0:
        # The kernels need a row: this one has no expert.
        rows = ops.pad(rows, ((0, 1), (0, 0)))
        return _kernels().grouped_mlp(rows, group_sizes, weights, activation)[:0]
    return _kernels().grouped_mlp(rows, group_sizes, weights, activation)


def split_of(layout: Any) -> Any:
    """How JAX splits rows and experts under a layout of kernels (E, D, H), or None."""
    from keras_moe.ops.kernels import _exchange_jax

    return _exchange_jax.split_of(layout)


def grouped_mlp_on_devices(
    rows: Tensor, group_sizes: Tensor, split: Any, activation: Callable, weights: dict
) -> Tensor:
    """`grouped_mlp` of each device's rows (P, R, D) and sizes (P, E) on JAX.

    The rows travel to the devices that have their experts and back.
    """
    from keras_moe.ops.kernels import _exchange_jax

    tensors = Weights._make(map(weights.get, Weights._fields)).map(
        ops.convert_to_tensor
    )
    return _exchange_jax.grouped_mlp(rows, group_sizes, tensors, activation, split)


def row_experts(group_sizes: Tensor, num_rows: Size) -> Tensor:
    """The expert of each row, for rows sorted by expert; the last for padding."""
    rows = ops.arange(num_rows, dtype="int32")
    experts = ops.searchsorted(ops.cumsum(group_sizes), rows, side="right")
    return ops.minimum(experts, group_sizes.shape[0] - 1)


def _kernels() -> Any:
    backend = keras.backend.backend()
    if backend == "jax":
        from keras_moe.ops.kernels import _grouped_jax as kernels
    elif backend == "tensorflow":
        from keras_moe.ops.kernels import _tensorflow as kernels
    else:
        from keras_moe.ops.kernels import _grouped_torch as kernels
    return kernels


_AXES = {
    "rows": "RD",
    "group_sizes": "E",
    "kernels": "EDH",
    "hidden_kernel": "EDH",
    "output_kernel": "EHD",
    "hidden_bias": "EH",
    "output_bias": "ED",
    "gate_kernel": "EDH",
    "gate_bias": "EH",
}


def _checked(arrays):
    """Those that are not None as tensors, if their shapes and dtypes fit."""
    tensors = {
        name: ops.convert_to_tensor(x) for name, x in arrays.items() if x is not None
    }
    received = {name: tuple(x.shape) for name, x in tensors.items()}
    kernel = next(shape for name, shape in received.items() if _AXES[name] == "EDH")
    # The number of rows is free.
    sizes = dict(zip("EDH", kernel))
    expected = {name: tuple(map(sizes.get, _AXES[name])) for name in tensors}
    if not all(fits_shape(received[name], expected[name]) for name in tensors):
        raise unfit(f"rows and weights of the shapes {expected}", **received)
    group_sizes = ops.cast(tensors.pop("group_sizes"), "int32")
    dtypes = {
        name: keras.backend.standardize_dtype(x.dtype) for name, x in tensors.items()
    }
    if len(set(dtypes.values())) > 1 or "float" not in dtypes["rows"]:
        raise unfit("rows and weights of one float dtype", **dtypes)
    return {**tensors, "group_sizes": group_sizes}
