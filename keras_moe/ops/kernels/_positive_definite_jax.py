"""Solves symmetric positive definite systems on JAX, by Cholesky's factors.

Half the time of the LU factors of `keras.ops.solve`, on CPUs and, by the compiler's
estimate, on TPUs. `keras.ops.cholesky` would raise an error for NaN outside of a trace.
"""

import jax
from jax import lax


@jax.jit
def solve(matrices: jax.Array, columns: jax.Array) -> jax.Array:
    """The X of A X = B, with A (..., N, N) and B (..., N, M)."""
    factors = lax.linalg.cholesky(matrices, symmetrize_input=False)
    for transposed in (False, True):
        columns = lax.linalg.triangular_solve(
            factors, columns, left_side=True, lower=True, transpose_a=transposed
        )
    return columns
