"""The published solver of sparsity-constrained transport: Adam on the semi-dual.

Axes: G groups, n the bound side (experts or tokens), m the other side.
"""

from typing import Any

from keras import ops

from keras_moe.ops.sparse_projection import FORBIDDEN, project


def adam(
    values: Any,
    mass: Any,
    target: Any,
    max_nonzeros: Any,
    iterations: int,
    learning_rate: float,
) -> Any:
    """Minimises the semi-dual from zero until its gradient's norm is at most 1e-3."""
    allowed = (values > FORBIDDEN) & (target > 0)
    beta1, beta2 = 0.9, 0.999

    def unfinished(step, potential, mean, square, norm):
        return (step < iterations) & ops.any(norm > 1e-3)

    def update(step, potential, mean, square, norm):
        plan = project(values + potential, allowed, mass, max_nonzeros)
        gradient = ops.sum(plan, axis=1, keepdims=True) - target
        rate = ops.cast(step + 1, "float32")
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * ops.square(gradient)
        change = (mean / (1 - beta1**rate)) / (
            ops.sqrt(square / (1 - beta2**rate)) + 1e-8
        )
        potential = ops.where(
            norm > 1e-3, potential - learning_rate * change, potential
        )
        latest = ops.sqrt(ops.sum(ops.square(gradient), axis=(1, 2), keepdims=True))
        return step + 1, potential, mean, square, ops.where(norm > 1e-3, latest, norm)

    zeros = ops.zeros_like(values[:, :1])
    norm = ops.full_like(zeros[:, :, :1], float("inf"))
    return ops.while_loop(unfinished, update, (0, zeros, zeros, zeros, norm))[1]
