"""Products of tokens and factors of a weight tensor, whose gradients keep little.

A factor is a matrix (N, R), or a core (R, N, S) of a ring, the matrix (N, R S).
It is kept as it is: its matrix would be a copy, and is made again.

Axes: N size of a mode, R and S ranks, I inputs, O units.
"""

import itertools
from typing import Any

from keras import ops

from keras_moe.ops.entmax import Source, gates_again
from keras_moe.ops.own_gradient import with_own_gradient


def projections(inputs: Any, *factors: Any) -> tuple[Any, ...]:
    """The products of the inputs and each of several factors.

    In the backward pass the factors are one: the gradient in the inputs is one matmul,
    and no sum of several, which would cost as much as they do.
    """
    return with_own_gradient(_project, _project_gradients, inputs, *factors)


def _project(inputs, *factors):
    size = inputs.shape[-1]
    outputs = []
    for factor in factors:
        matrix = _matrix(factor)
        output = ops.matmul(inputs, matrix[:size])
        outputs.append(output if matrix.shape[0] == size else output + matrix[size])
    return tuple(outputs), (inputs, *factors)


def _project_gradients(kept, *upstream):
    inputs, *factors = kept
    matrices = [_matrix(factor) for factor in factors]
    size = inputs.shape[-1]
    upstream = [rows(x) for x in upstream]
    together = ops.concatenate(upstream, axis=-1)
    matrix = ops.concatenate([matrix[:size] for matrix in matrices], axis=-1)
    inputs_gradient = ops.matmul(together, ops.transpose(matrix))
    matrix_gradient = ops.matmul(ops.transpose(rows(inputs)), together)
    gradients, start = [ops.reshape(inputs_gradient, ops.shape(inputs))], 0
    for factor, matrix, own in zip(factors, matrices, upstream):
        part = matrix_gradient[:, start : start + matrix.shape[1]]
        if matrix.shape[0] > size:
            total = ops.sum(own, axis=0, keepdims=True)
            part = ops.concatenate([part, total], axis=0)
        gradients.append(_factor(part, factor))
        start += matrix.shape[1]
    return tuple(gradients)


def mixed(coefficients: Any, factor: Any, source: Any = ()) -> Any:
    """The product of coefficients and a factor."""

    # Gradients close over no tensor.
    count = len(source)

    def forward(coefficients, factor, *source):
        product = ops.matmul(coefficients, _matrix(factor))
        return product, (factor, *(source or (coefficients,)))

    def backward(kept, upstream):
        factor, *kept = kept
        (coefficients,) = _parts(kept, [count])
        gradient = ops.matmul(upstream, ops.transpose(_matrix(factor)))
        part = ops.matmul(ops.transpose(rows(coefficients)), rows(upstream))
        return gradient, _factor(part, factor), *[None] * count

    return with_own_gradient(forward, backward, coefficients, factor, *source)


def merged_matmul(
    merge: Any, gradients: Any, closing: Any, parts: list[Any], sources: Any = None
) -> Any:
    """`merge(*parts)` by the closing factor; only these are kept for the gradient.

    The merged parts are computed again in the backward pass: this is cheap beside the
    matmuls, and they would be most of the layer's memory.
    """
    sources = sources or [()] * len(parts)
    # A source has None of `backward` for its gradient: that of its part is its own.
    flat = [tensor for source in sources for tensor in source]
    # Gradients close over no tensor.
    counts = [len(source) for source in sources]

    def forward(closing, *tensors):
        parts, flat = tensors[: len(counts)], iter(tensors[len(counts) :])
        kept = []
        for part, count in zip(parts, counts):
            kept += itertools.islice(flat, count) if count else [part]
        return ops.matmul(merge(*parts), _closing_matrix(closing)), (closing, *kept)

    def backward(kept, upstream):
        closing, *kept = kept
        parts = _parts(kept, counts)
        matrix = ops.transpose(_closing_matrix(closing))
        merged_gradient = ops.matmul(upstream, matrix)
        merged = ops.transpose(rows(merge(*parts)))
        part = ops.matmul(merged, rows(upstream))
        return (
            _closing_factor(part, closing),
            *gradients(merged_gradient, *parts),
            *[None] * sum(counts),
        )

    return with_own_gradient(forward, backward, closing, *parts, *flat)


def _parts(kept, counts):
    """Parts, of which some are kept as they are, and some as a count of tensors."""
    kept, parts = iter(kept), []
    for count in counts:
        if count:
            parts.append(gates_again(Source(*itertools.islice(kept, count))))
        else:
            parts.append(next(kept))
    return parts


def rows(x: Any) -> Any:
    """(..., N) as a matrix."""
    return ops.reshape(x, (-1, x.shape[-1]))


def _matrix(factor):
    """(R, N, S) as (N, R S); a matrix as it is."""
    if len(factor.shape) == 2:
        return factor
    rank, size, following = factor.shape
    return ops.reshape(ops.transpose(factor, (1, 0, 2)), (size, rank * following))


def _factor(matrix, factor):
    """A gradient in `_matrix(factor)` as one in the factor."""
    if len(factor.shape) == 2:
        return matrix
    rank, size, following = factor.shape
    return ops.transpose(ops.reshape(matrix, (size, rank, following)), (1, 0, 2))


def _closing_matrix(factor):
    """(O, R) as (R, O), and (S, O, R) as (R S, O)."""
    if len(factor.shape) == 2:
        return ops.transpose(factor)
    last, units, first = factor.shape
    return ops.reshape(ops.transpose(factor, (2, 0, 1)), (first * last, units))


def _closing_factor(matrix, factor):
    """A gradient in `_closing_matrix(factor)` as one in the factor."""
    if len(factor.shape) == 2:
        return ops.transpose(matrix)
    last, units, first = factor.shape
    return ops.transpose(ops.reshape(matrix, (first, last, units)), (1, 2, 0))
