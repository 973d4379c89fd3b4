"""muMoE's forward passes: a product of expert coefficients, input and weight tensor.

`y_o = sum over n_1 ... n_L, i of W[n_1, ..., n_L, i, o] a^1[n_1] ... a^L[n_L] x[i]`,
computed in factorised form: no tensor of size N x I x O is built.

Axes: L levels of hierarchy, N_l experts of a level, I inputs, O units, R ranks.
"""

import math
import string
from typing import Any

from keras import ops

from keras_moe.ops.factor_products import merged_matmul, mixed, projections, rows

FACTORIZATIONS = ("cp", "tr", "tucker", None)


def factor_shapes(
    factorization: str | None,
    num_experts: tuple[int, ...],
    inputs: int,
    units: int,
    rank: Any,
) -> list[tuple[int, ...]]:
    """The shapes of a weight tensor's factors: one per level, input, output."""
    modes = (*num_experts, inputs, units)
    if factorization is None:
        return [modes]
    if factorization == "cp":
        return [(size, rank) for size in modes]
    if factorization == "tr":
        following = (*rank[1:], rank[0])
        return list(zip(rank, modes, following))
    return [*zip(modes, rank), tuple(rank)]


def multilinear(
    inputs: Any,
    coefficients: list[Any],
    factors: list[Any],
    factorization: str | None,
    projected: Any = None,
    sources: Any = None,
) -> Any:
    """muMoE's forward pass of one layer."""
    if factorization is None:
        return _full(inputs, coefficients, factors)
    if projected is None:
        (projected,) = projections(inputs, input_factor(factors, factorization))
    sources = sources or [()] * len(coefficients)
    return _FORWARD[factorization](projected, coefficients, factors, sources)


def input_factor(factors: list[Any], factorization: str | None) -> Any:
    """The factor by which a factorised layer takes its inputs first."""
    if factorization is None:
        return None
    return factors[-3 if factorization == "tucker" else -2]


def _cp(projected, coefficients, factors, sources):
    # Equation 2: everything is one elementwise product of rank R.
    *experts, _, output_factor = factors
    parts = [projected, *coefficients, *experts]
    sources = ((), *sources, *(() for _ in experts))
    return merged_matmul(_scale, _scale_gradients, output_factor, parts, sources)


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
        factor_gradients.append(ops.matmul(ops.transpose(rows(a)), rows(others)))
    for scale in scales:
        upstream = upstream * scale
    return upstream, *coefficient_gradients, *factor_gradients


def _tr(projected, coefficients, factors, sources):
    # Equation 3: matrices from the experts' cores, one from the input's; the ring
    # closes in the output's core.
    *experts, input_core, output_core = factors
    chain = None
    for coefficient, core, source in zip(coefficients, experts, sources):
        matrix = _as_core(mixed(coefficient, core, source), core)
        chain = matrix if chain is None else ops.matmul(chain, matrix)
    projected = _as_core(projected, input_core)
    return merged_matmul(_ring, _ring_gradients, output_core, [chain, projected])


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


def _full(inputs, coefficients, factors):
    (tensor,) = factors
    if tensor.shape[-2] != inputs.shape[-1]:
        inputs = ops.concatenate([inputs, ops.ones_like(inputs[..., :1])], axis=-1)
    return _apply(tensor, [*coefficients, inputs])


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


def expert_matrix(factors: list[Any], index: Any, factorization: str | None) -> Any:
    """One expert's matrix (I, O), for inspection."""
    if factorization is None:
        return factors[0][tuple(index)]
    if factorization == "cp":
        *experts, input_factor, output_factor = factors
        scale = 1.0
        for place, factor in zip(index, experts):
            scale = scale * factor[place]
        return ops.matmul(input_factor * scale, ops.transpose(output_factor))
    if factorization == "tr":
        *experts, input_factor, output_factor = factors
        chain = None
        for place, core in zip(index, experts):
            matrix = core[:, place]
            chain = matrix if chain is None else ops.matmul(chain, matrix)
        return ops.einsum("ab,bic,coa->io", chain, input_factor, output_factor)
    *experts, input_factor, output_factor, core = factors
    for place, factor in zip(index, experts):
        core = ops.tensordot(factor[place], core, axes=[[0], [0]])
    return ops.matmul(ops.matmul(input_factor, core), ops.transpose(output_factor))


def dense_tensor(factors: list[Any], factorization: str | None) -> Any:
    """The whole weight tensor (N_1, ..., N_L, I, O), for tests of small ones."""
    if factorization is None:
        return factors[0]
    letters = string.ascii_lowercase
    if factorization == "cp":
        modes = letters[: len(factors)]
        terms = ",".join(f"{mode}z" for mode in modes)
        return ops.einsum(f"{terms}->{modes}", *factors)
    if factorization == "tr":
        count = len(factors)
        modes, ranks = letters[:count], letters[count : 2 * count]
        terms = ",".join(
            f"{ranks[k]}{modes[k]}{ranks[(k + 1) % count]}" for k in range(count)
        )
        return ops.einsum(f"{terms}->{modes}", *factors)
    *matrices, core = factors
    count = len(matrices)
    modes, ranks = letters[:count], letters[count : 2 * count]
    terms = ",".join(f"{modes[k]}{ranks[k]}" for k in range(count))
    return ops.einsum(f"{terms},{ranks}->{modes}", *matrices, core)


def rank_bound(
    factorization: str | None, num_experts: tuple[int, ...], inputs: int, units: int,
    rank: Any,
) -> int:  # fmt: skip
    """The largest rank that an expert's matrix may have."""
    full = min(inputs, units)
    if factorization is None:
        return full
    if factorization == "cp":
        return min(full, rank)
    if factorization == "tr":
        # The bound of the experts' chain (R_1 x R_(L+1)) between input and output core.
        narrow = min(rank[: len(num_experts) + 1])
        return min(full, rank[-1] * narrow)
    return min(full, rank[-2], rank[-1])
