"""Building blocks that `keras.ops` lacks or that its backends do differently."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_moe._types import Size, Tensor

# The largest exponent for which real_power multiplies.
_LARGEST_PRODUCT = 16
# The smallest normal float32.
_TINY = 1.1754944e-38


def custom_gradient(forward: Callable, backward: Callable, *inputs: Tensor) -> Any:
    """The outputs of `forward`, differentiated by `backward(residuals, *upstream)`."""
    # `forward` returns both, and `backward` closes over no tensor. Keras's own keep too
    # much: on PyTorch all inputs, and outputs until garbage is collected, and on
    # TensorFlow every graph, for ever.
    inputs = tuple(ops.convert_to_tensor(x) for x in inputs)
    backend = keras.backend.backend()
    if backend == "torch":
        from keras_moe.ops.kernels import _gradients_torch

        return _gradients_torch.custom_gradient(forward, backward, *inputs)
    if backend == "tensorflow":
        from keras_moe.ops.kernels import _tensorflow

        return _tensorflow.custom_gradient(forward, backward, *inputs)

    @ops.custom_gradient
    def function(*inputs):
        outputs, residuals = forward(*inputs)
        specs = [(x.shape, x.dtype) for x in inputs]

        def gradient(*upstream):
            gradients = backward(residuals, *tree.flatten(upstream))
            # JAX takes no None.
            return tuple(
                ops.zeros(*spec) if x is None else x
                for x, spec in zip(gradients, specs, strict=True)
            )

        return outputs, gradient

    return function(*inputs)


def remat(function: Callable) -> Callable:
    """`keras.remat`, which keeps every graph on TensorFlow, of functions of tensors."""
    if keras.backend.backend() != "tensorflow":
        return keras.remat(function)
    from keras_moe.ops.kernels import _tensorflow

    return functools.partial(_tensorflow.remat, function)


def on_several_devices() -> bool:
    """Whether a distribution over more than one device is set."""
    distribution = keras.distribution.distribution()
    return distribution is not None and distribution.device_mesh.devices.size > 1


def vmap_groups(function: Callable[..., Any], *arrays: Tensor | None) -> Any:
    """`function(*arrays)`, vectorized over the groups on several devices."""
    # On one device, one flat table is fastest. On several, a partitioner would then
    # gather all groups on every device, since an index might leave its group.
    if not on_several_devices():
        return function(*arrays)
    is_present = [x is not None for x in arrays]

    def for_group(present):
        present = iter(present)
        group = [ops.expand_dims(next(present), 0) if x else None for x in is_present]
        return tree.map_structure(lambda x: x[0], function(*group))

    return ops.vectorized_map(for_group, [x for x in arrays if x is not None])


def max_along(x: Tensor, axis: int, keepdims: bool = False) -> Tensor:
    """`ops.max` along one axis; another axis may be empty."""
    return _reduce(ops.max, x, axis, keepdims)


def min_along(x: Tensor, axis: int, keepdims: bool = False) -> Tensor:
    """`ops.min` along one axis; another axis may be empty."""
    return _reduce(ops.min, x, axis, keepdims)


def _reduce(reduce, x, axis, keepdims):
    # Some backends refuse empty tensors. Their sum has the right shape.
    reduce = ops.sum if 0 in tuple(x.shape) else reduce
    return reduce(x, axis=axis, keepdims=keepdims)


def argmax(x: Tensor) -> Tensor:
    """The first index of the largest value in the last axis, int32 (..., 1)."""
    if keras.backend.backend() != "tensorflow":
        return ops.cast(ops.argmax(x, axis=-1, keepdims=True), "int32")
    from keras_moe._backends import tensorflow

    return tensorflow.argmax(x)


def take(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`, also for an empty table and no rows."""
    if 0 not in tuple(table.shape):
        return ops.take(table, rows, axis=0)
    return ops.zeros((*ops.shape(rows), *table.shape[1:]), table.dtype)


def take_along_axis(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """`ops.take_along_axis` for indices of at least 0, which are broadcast to `x`."""
    if keras.backend.backend() != "torch":
        return ops.take_along_axis(x, indices, axis=axis)
    from keras_moe._backends import torch

    return torch.take_along_axis(x, indices, axis)


def scatter(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """`x` (N,) with values (V,) at the places (V,)."""
    if keras.backend.backend() != "torch":
        return ops.scatter_update(x, ops.expand_dims(places, -1), values)
    from keras_moe._backends import torch

    return torch.scatter(x, places, values)


def is_transformed() -> bool:
    """Whether `torch.func` takes gradients or vectorises what is called now."""
    if keras.backend.backend() != "torch":
        return False
    from keras_moe.ops.kernels import _gradients_torch

    return _gradients_torch.is_transformed()


def replica_sum(x: Tensor) -> Tensor:
    """The sum over replicas that run programs of their own, which JAX's do not."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from keras_moe._backends import tensorflow

        return tensorflow.replica_sum(x)
    if backend == "torch":
        from keras_moe._backends import torch

        return torch.replica_sum(x)
    return x


def searchsorted(edges: Tensor, values: Tensor) -> Tensor:
    """The number of sorted `edges` (N,) below each value (V,), int32."""
    if keras.backend.backend() != "torch":
        return ops.cast(ops.searchsorted(edges, values), "int32")
    from keras_moe._backends import torch

    return torch.searchsorted(edges, values)


def top_values(
    values: Tensor, number: Size, stable: bool = True
) -> tuple[Tensor, Tensor]:
    """The largest values of the last axis, falling, and indices; ties to the lowest."""
    backend = keras.backend.backend()
    # PyTorch's `topk` takes ties in any order. In an exported JAX model, where some
    # dimensions are symbolic, the installed TensorFlow may be too old for `top_k`.
    exports = backend == "jax" and not all(isinstance(d, int) for d in values.shape)
    if exports or (backend == "torch" and stable):
        index = ops.argsort(-values, axis=-1)[..., :number]
        return take_along_axis(values, index, axis=-1), ops.cast(index, "int32")
    best, index = ops.top_k(values, number)
    return best, ops.cast(index, "int32")


def real_power(x: Tensor, exponent: float) -> Tensor:
    """`x ** exponent` for x >= 0, by products or roots where they are cheaper."""
    x = ops.convert_to_tensor(x)
    if exponent == 0:
        return ops.ones_like(x)
    if exponent == 0.5:
        return ops.sqrt(x)
    if is_product(exponent):
        return product(x, int(exponent))
    # Roots and logarithms have no slope at 0.
    positive = ops.maximum(x, _TINY)
    if exponent == 0.75:
        root = ops.sqrt(positive)
        power = root * ops.sqrt(root)
    else:
        # XLA on a CPU takes five times as long for a power, computed one by one.
        power = ops.exp(exponent * ops.log(positive))
    return ops.where(x > 0, power, 0.0)


def is_product(exponent: float) -> bool:
    """Whether a power is best computed by multiplications."""
    return exponent == int(exponent) and 1 <= exponent <= _LARGEST_PRODUCT


def product(x: Tensor, exponent: int) -> Tensor:
    """`x ** exponent` for an integer of at least 1, by repeated squaring."""
    while exponent % 2 == 0:
        x, exponent = x * x, exponent // 2
    power = x
    # TensorFlow's autograph takes no assignment within an expression.
    while exponent > 1:
        x, exponent = x * x, exponent // 2
        if exponent % 2:
            power = power * x
    return power
