"""Multiply-adds of muMoE's forward passes: factorised, and by the whole weight tensor.

Axes: L levels of hierarchy, N_l experts of a level, I inputs, O units, R ranks.
"""

import math
from typing import Any

from keras_moe.ops.multilinear import factor_shapes


def factorized_multiply_adds(
    factorization: str | None,
    num_experts: tuple[int, ...],
    inputs: int,
    units: int,
    rank: Any,
) -> int:
    """Multiply-adds of one token's matmuls in factorised form.

    Elementwise products are not counted, as in the paper.
    """
    shapes = factor_shapes(factorization, num_experts, inputs, units, rank)
    total = sum(math.prod(shape) for shape in shapes)
    if factorization == "tr":
        narrow, first, *others = rank
        # The chain of matrices R_1 x R_l, then the ring's closing.
        for following in others:
            total += narrow * first * following
            first = following
    return total


def naive_multiply_adds(
    factorization: str | None,
    num_experts: tuple[int, ...],
    inputs: int,
    units: int,
    rank: Any,
) -> int:
    """Multiply-adds of one token if the weight tensor is built from its factors."""
    modes = (*num_experts, inputs, units)
    total = _building(factorization, modes, rank)
    # One mode after the other; the units are left.
    for place in range(len(modes) - 1):
        total += math.prod(modes[place:])
    return total


def _building(factorization, modes, rank):
    if factorization is None:
        return 0
    if factorization == "cp":
        return math.prod(modes) * rank
    total = 0
    if factorization == "tr":
        # A chain (R_1, built modes, R_l); the last core's other end is R_1 again.
        for place in range(1, len(modes)):
            built = math.prod(modes[: place + 1])
            total += rank[0] * built * rank[place] * (*rank[1:], 1)[place]
        return total
    for place, size in enumerate(modes):
        total += math.prod(modes[:place]) * size * math.prod(rank[place:])
    return total
