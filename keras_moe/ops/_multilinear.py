"""muMoE's forward passes: a product of expert coefficients, input and weight tensor.

Axes: L levels of hierarchy, N_l experts of a level, I inputs, O units, R ranks.

    y_o = sum over n_1 ... n_L, i of W[n_1, ..., n_L, i, o] a^1[n_1] ... a^L[n_L] x[i],

computed in factorised form: no tensor of size N x I x O is built. The factors of W are
those of *Multilinear Mixture of Experts*, section 3.1.1 and appendix C: matrices (N, R)
in CP and Tucker, cores (R, N, S) of a ring in TR.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import ops

from keras_moe._types import Tensor
from keras_moe.ops._primitives import custom_gradient
from keras_moe.ops.entmax import Source, gates_again

FACTORIZATIONS = ("cp", "tr", "tucker", None)


class TensorSpec(NamedTuple):
    """The weight tensor of one layer: its modes, and how it is factorised."""

    factorization: str | None
    num_experts: tuple[int, ...]
    inputs: int
    units: int
    rank: Any

    @property
    def modes(self) -> tuple[int, ...]:
        return (*self.num_experts, self.inputs, self.units)

    @property
    def factor_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the factors: one per level, input, output."""
        if self.factorization is None:
            return [self.modes]
        if self.factorization == "cp":
            # (N_l, R) ..., (I, R), (O, R).
            return [(size, self.rank) for size in self.modes]
        if self.factorization == "tr":
            # (R_l, N_l, R_(l+1)) ..., (R_(L+1), I, R_(L+2)), (R_(L+2), O, R_1).
            following = (*self.rank[1:], self.rank[0])
            return list(zip(self.rank, self.modes, following))
        # (N_l, R_l) ..., (I, R_(L+1)), (O, R_(L+2)), and the core of all ranks.
        return [*zip(self.modes, self.rank), tuple(self.rank)]

    @property
    def rank_bound(self) -> int:
        """The largest rank that an expert's matrix may have."""
        full = min(self.inputs, self.units)
        if self.factorization is None:
            return full
        if self.factorization == "cp":
            return min(full, self.rank)
        if self.factorization == "tr":
            # The experts' chain (R_1 x R_(L+1)) is between input and output core.
            narrow = min(self.rank[: len(self.num_experts) + 1])
            return min(full, self.rank[-1] * narrow)
        return min(full, self.rank[-2], self.rank[-1])

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one token's factorised matmuls (no elementwise products)."""
        total = sum(map(math.prod, self.factor_shapes))
        if self.factorization == "tr":
            narrow, first, *others = self.rank
            # The chain of matrices R_1 x R_l, then the ring's closing.
            for following in others:
                total += narrow * first * following
                first = following
        return total


def multilinear(
    inputs: Tensor,
    coefficients: list[Tensor],
    factors: list[Tensor],
    factorization: str | None,
    projected: Tensor | None = None,
    sources: Sequence[Sequence[Tensor]] | None = None,
) -> Tensor:
    """muMoE's forward pass of one layer: equations 1 to 3, and 15 to 18."""
    # `inputs` are (..., I), or (..., I - 1), to which a constant 1 is added; there is
    # a tensor (..., N_l) of `coefficients` for each level. `projected` is the inputs
    # times `input_factor`, if known; `sources` has each level's `Source` instead.
    if factorization is None:
        (tensor,) = factors
        if tensor.shape[-2] != inputs.shape[-1]:
            inputs = ops.concatenate([inputs, ops.ones_like(inputs[..., :1])], axis=-1)
        return _apply(tensor, [*coefficients, inputs])
    if projected is None:
        (projected,) = projections(inputs, input_factor(factors, factorization))
    sources = sources or [()] * len(coefficients)
    return _FORWARD[factorization](projected, coefficients, factors, sources)


def input_factor(factors: list[Tensor], factorization: str | None) -> Any:
    """The factor by which a factorised layer takes its inputs first."""
    if factorization is None:
        return None
    return factors[-3 if factorization == "tucker" else -2]


def _cp(projected, coefficients, factors, sources):
    # Equation 2: everything is one elementwise product of rank R.
    *experts, _, output_factor = factors
    parts = [projected, *coefficients, *experts]
    sources = ((), *sources, *(() for _ in experts))
    return _merged_matmul(_scale, _scale_gradients, output_factor, parts, sources)


def _scale(projected, *pairs):
    """The projected input, scaled by each level's coefficients through its factor."""
    for scale in _scales(pairs):
        projected = projected * scale
    return projected


def _scales(pairs):
    levels = len(pairs) // 2
    return [ops.matmul(a, factor) for a, factor in zip(pairs[:levels], pairs[levels:])]


def _scale_gradients(upstream, projected, *pairs):
    levels, scales = len(pairs) // 2, _scales(pairs)
    coefficient_gradients, factor_gradients = [], []
    for level, (a, factor) in enumerate(zip(pairs[:levels], pairs[levels:])):
        others = upstream * projected
        for scale in scales[:level] + scales[level + 1 :]:
            others = others * scale
        coefficient_gradients.append(ops.matmul(others, ops.transpose(factor)))
        factor_gradients.append(ops.matmul(ops.transpose(_rows(a)), _rows(others)))
    for scale in scales:
        upstream = upstream * scale
    return upstream, *coefficient_gradients, *factor_gradients


def _tr(projected, coefficients, factors, sources):
    # Equation 3: matrices from the experts' cores, one from the input's; the ring
    # closes in the output's core.
    *experts, input_core, output_core = factors
    chain: Any = None
    for coefficient, core, source in zip(coefficients, experts, sources):
        matrix = _as_core(_mixed(coefficient, core, source), core)
        chain = matrix if chain is None else ops.matmul(chain, matrix)
    projected = _as_core(projected, input_core)
    return _merged_matmul(_ring, _ring_gradients, output_core, [chain, projected])


def _as_core(x, core):
    """(..., R S), which came from (R, N, S), as (..., R, S)."""
    return ops.reshape(x, (*ops.shape(x)[:-1], core.shape[0], core.shape[2]))


def _ring(chain, projected):
    size = chain.shape[-2] * projected.shape[-1]
    product = ops.matmul(chain, projected)
    return ops.reshape(product, (*ops.shape(product)[:-2], size))


def _ring_gradients(upstream, chain, projected):
    matrix = (chain.shape[-2], projected.shape[-1])
    upstream = ops.reshape(upstream, (*ops.shape(upstream)[:-1], *matrix))
    return (
        ops.matmul(upstream, ops.swapaxes(projected, -1, -2)),
        ops.matmul(ops.swapaxes(chain, -1, -2), upstream),
    )


def _tucker(projected, coefficients, factors, _):
    *experts, _, output_factor, core = factors
    reduced = [ops.matmul(a, factor) for a, factor in zip(coefficients, experts)]
    reduced.append(projected)
    return ops.matmul(_apply(core, reduced), ops.transpose(output_factor))


def _apply(tensor, vectors):
    """A tensor of modes (M_1, ..., M_K, O) times a vector (..., M_k) for each mode."""
    first, *others = vectors
    size, *rest = tensor.shape
    leading = ops.shape(first)[:-1]
    result = ops.matmul(first, ops.reshape(tensor, (size, math.prod(rest))))
    for vector in others:
        size, *rest = rest
        result = ops.reshape(result, (*leading, size, math.prod(rest)))
        result = ops.squeeze(ops.matmul(vector[..., None, :], result), axis=-2)
    return result


_FORWARD = {"cp": _cp, "tr": _tr, "tucker": _tucker}


def expert_matrix(
    factors: list[Tensor], index: Sequence[int], factorization: str | None
) -> Tensor:
    """One expert's matrix (I, O), for inspection."""
    if factorization is None:
        return factors[0][tuple(index)]
    if factorization == "cp":
        *experts, input_factor, output_factor = factors
        scale = 1.0
        for i, factor in zip(index, experts):
            scale = scale * factor[i]
        return ops.matmul(input_factor * scale, ops.transpose(output_factor))
    if factorization == "tr":
        *experts, input_factor, output_factor = factors
        chain = None
        for i, core in zip(index, experts):
            matrix = core[:, i]
            chain = matrix if chain is None else ops.matmul(chain, matrix)
        return ops.einsum("ab,bic,coa->io", chain, input_factor, output_factor)
    *experts, input_factor, output_factor, core = factors
    for i, factor in zip(index, experts):
        core = ops.tensordot(factor[i], core, axes=[[0], [0]])
    return ops.matmul(ops.matmul(input_factor, core), ops.transpose(output_factor))


def projections(inputs: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    """The products of the inputs (..., I) and each factor, (..., R) or (..., R S)."""

    # A factor of I + 1 rows adds a constant input 1. The inputs' gradient is a matmul.
    def forward(inputs, *factors):
        size = inputs.shape[-1]
        outputs = []
        for factor in factors:
            matrix = _matrix(factor)
            output = ops.matmul(inputs, matrix[:size])
            outputs.append(output if matrix.shape[0] == size else output + matrix[size])
        return tuple(outputs), (inputs, *factors)

    return custom_gradient(forward, _project_gradients, inputs, *factors)


def _project_gradients(kept, *upstream):
    inputs, *factors = kept
    matrices = [_matrix(factor) for factor in factors]
    size = inputs.shape[-1]
    upstream = [_rows(x) for x in upstream]
    together = ops.concatenate(upstream, axis=-1)
    matrix = ops.concatenate([matrix[:size] for matrix in matrices], axis=-1)
    inputs_gradient = ops.matmul(together, ops.transpose(matrix))
    matrix_gradient = ops.matmul(ops.transpose(_rows(inputs)), together)
    gradients, start = [ops.reshape(inputs_gradient, ops.shape(inputs))], 0
    for factor, matrix, own in zip(factors, matrices, upstream):
        part = matrix_gradient[:, start : start + matrix.shape[1]]
        if matrix.shape[0] > size:
            total = ops.sum(own, axis=0, keepdims=True)
            part = ops.concatenate([part, total], axis=0)
        gradients.append(_factor(part, factor))
        start += matrix.shape[1]
    return tuple(gradients)


def _mixed(
    coefficients: Tensor, factor: Tensor, source: Sequence[Tensor] = ()
) -> Tensor:
    """Coefficients (..., N) times a factor; the gradient keeps a `source` instead."""
    count = len(source)

    def forward(coefficients, factor, *source):
        product = ops.matmul(coefficients, _matrix(factor))
        return product, (factor, *(source or (coefficients,)))

    def backward(kept, upstream):
        factor, *kept = kept
        (coefficients,) = _parts(kept, [count])
        gradient = ops.matmul(upstream, ops.transpose(_matrix(factor)))
        part = ops.matmul(ops.transpose(_rows(coefficients)), _rows(upstream))
        return gradient, _factor(part, factor), *[None] * count

    return custom_gradient(forward, backward, coefficients, factor, *source)


def _merged_matmul(
    merge: Callable[..., Tensor],
    gradients: Callable[..., tuple[Tensor, ...]],
    closing: Tensor,
    parts: list[Tensor],
    sources: Sequence[Sequence[Tensor]] | None = None,
) -> Tensor:
    """`merge(*parts)` by the closing factor; only these are kept for the gradient."""
    # The merged parts, which would be most of the layer's memory, are recomputed in
    # the backward pass. `gradients(upstream, *parts)` are those of `merge`. A part's
    # source, if there is one, is kept instead of it.
    sources = sources or [()] * len(parts)
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
        merged = ops.transpose(_rows(merge(*parts)))
        part = ops.matmul(merged, _rows(upstream))
        return (
            _closing_factor(part, closing),
            *gradients(merged_gradient, *parts),
            *[None] * sum(counts),
        )

    return custom_gradient(forward, backward, closing, *parts, *flat)


def _parts(kept, counts):
    """Parts, some of which are kept as they are, and some as a source."""
    kept, parts = iter(kept), []
    for count in counts:
        if count:
            parts.append(gates_again(Source(*itertools.islice(kept, count))))
        else:
            parts.append(next(kept))
    return parts


def _rows(x: Tensor) -> Tensor:
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
