"""muMoE's whole weight tensor, made from its factors."""

import string
from typing import Any

from keras import ops


def dense_tensor(factors: list[Any], factorization: str | None) -> Any:
    """The whole weight tensor (N_1, ..., N_L, I, O), for small ones."""
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
