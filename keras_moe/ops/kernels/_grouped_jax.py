"""Grouped matmul and MLP on JAX: loops, a GPU kernel, or `lax.ragged_dot` on TPUs.

Axes: R rows, E experts, D hidden, H mlp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from keras_moe._backends.jax import by_platform, jit_by_platform, platforms
from keras_moe.ops.kernels import _block_loops
from keras_moe.ops.kernels._block_loops import Weights, activate

# (R, D) and (R, H) to (E, D, H): the rows are ragged and summed over.
_ROWS_TIMES_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
# (R, H) and (E, D, H) to (R, D).
_ROWS_TIMES_TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [2]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


# One after another: `ragged_dot` has no form for a batch of group sizes.
@jax.custom_batching.sequential_vmap
def ragged_forward(rows, kernels, group_sizes):
    return lax.ragged_dot(rows, kernels, group_sizes)


@jax.custom_batching.sequential_vmap
def ragged_backward(rows, kernels, group_sizes, upstream):
    return (
        lax.ragged_dot_general(upstream, kernels, group_sizes, _ROWS_TIMES_TRANSPOSED),
        lax.ragged_dot_general(rows, upstream, group_sizes, _ROWS_TIMES_ROWS),
    )


RAGGED = ragged_forward, ragged_backward


def _differentiable(kernel, ragged):
    """A Pallas kernel, which has no derivative, with that of `ragged_dot`."""
    kernel = jax.custom_jvp(kernel)

    @kernel.defjvp
    def _(primals, tangents):
        return kernel(*primals), jax.jvp(ragged, primals, tangents)[1]

    return kernel


@functools.cache
def pallas() -> tuple[tuple[str, ...], tuple]:
    """The kernels for NVIDIA GPUs, which only programs for these import, and dtypes."""
    from keras_moe.ops.kernels import _grouped_pallas

    return _grouped_pallas.DTYPES, (
        _differentiable(_grouped_pallas.forward, ragged_forward),
        _differentiable(_grouped_pallas.backward, ragged_backward),
    )


def _matmuls_by_platform(loops, composed, rows, *arguments):
    """`loops` on CPUs, and elsewhere `composed` of the platform's grouped matmuls."""
    # On CPUs and GPUs `ragged_dot` computes every expert on every row.
    # Both need a number of rows, which a symbolic dimension is not.
    if not isinstance(rows.shape[0], int):
        return composed(RAGGED)(rows, *arguments)
    forms = {"cpu": loops, "default": composed(RAGGED)}
    if "cuda" in platforms():
        dtypes, matmuls = pallas()
        if str(rows.dtype) in dtypes:
            forms["cuda"] = composed(matmuls)
    return by_platform(rows, *arguments, **forms)


@jit_by_platform()
def _matmul_forward(*inputs):
    loops = _block_loops.matmul_forward
    return _matmuls_by_platform(loops, lambda matmuls: matmuls[0], *inputs)


@jit_by_platform()
def _matmul_backward(*inputs):
    loops = _block_loops.matmul_backward
    return _matmuls_by_platform(loops, lambda matmuls: matmuls[1], *inputs)


@jax.custom_vjp
def grouped_matmul(rows, kernels, group_sizes):
    """See `keras_moe.ops.grouped_matmul`."""
    return _matmul_forward(rows, kernels, group_sizes)


grouped_matmul.defvjp(
    lambda *inputs: (_matmul_forward(*inputs), inputs),
    lambda inputs, upstream: (*_matmul_backward(*inputs, upstream), None),
)


def _owners(rows, group_sizes):
    """The rows that an expert has (R, 1), and their experts as one-hots (R, E)."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0], dtype="int32")[:, None]
    owner = (row < ends) & (row >= ends - group_sizes)
    return row < ends[-1], owner


def composed_forward(rows, group_sizes, weights, activation, keep, matmuls=RAGGED):
    """`_block_loops.mlp_forward` by a grouped matmul for each layer."""
    matmul, _ = matmuls
    own, owner = _owners(rows, group_sizes)
    owner = owner.astype(rows.dtype)

    def linear(name, x):
        outputs = matmul(x, getattr(weights, f"{name}_kernel"), group_sizes)
        bias = getattr(weights, f"{name}_bias")
        if bias is None:
            return outputs
        # Exact, and on TPUs within the addition, where a gather would write an array.
        return outputs + jnp.matmul(owner, bias, precision="highest")

    if keep:
        # The gradient may read the rows of no expert.
        rows = jnp.where(own, rows, 0)
    names = ("hidden",) if weights.gate_kernel is None else ("hidden", "gate")
    kept = tuple(linear(name, rows) for name in names)
    outputs = linear("output", activate(activation, *kept))
    return jnp.where(own, outputs, 0), kept if keep else ()


def composed_backward(
    rows, group_sizes, weights, kept, upstream, activation, matmuls=RAGGED
):
    """`_block_loops.mlp_backward` by grouped matmuls."""
    _, matmul_gradients = matmuls
    own, owner = _owners(rows, group_sizes)
    gradients = {}

    def linear(name, x, upstream):
        dx, gradients[f"{name}_kernel"] = matmul_gradients(
            x, getattr(weights, f"{name}_kernel"), group_sizes, upstream
        )
        # A scatter would add in any order; this matmul is small beside the others.
        gradients[f"{name}_bias"] = jnp.matmul(owner.T.astype(upstream.dtype), upstream)
        return dx

    rows, upstream = jnp.where(own, rows, 0), jnp.where(own, upstream, 0)
    activated, pullback = jax.vjp(lambda *values: activate(activation, *values), *kept)
    dx = 0.0
    for name, dh in zip(
        ("hidden", "gate"), pullback(linear("output", activated, upstream))
    ):
        dx = dx + linear(name, rows, dh)
    weight_gradients = Weights._make(
        None if x is None else gradients[name]
        for name, x in zip(weights._fields, weights)
    )
    return jnp.where(own, dx, 0), weight_gradients


def _mlp_by_platform(loops, composed, *inputs, **options):
    return _matmuls_by_platform(
        functools.partial(loops, **options),
        lambda matmuls: functools.partial(composed, matmuls=matmuls, **options),
        *inputs,
    )


@jit_by_platform(static_argnums=(3, 4))
def mlp_forward(rows, group_sizes, weights, activation, keep):
    forms = _block_loops.mlp_forward, composed_forward
    options = {"activation": activation, "keep": keep}
    return _mlp_by_platform(*forms, rows, group_sizes, weights, **options)


@jit_by_platform(static_argnums=(5,))
def mlp_backward(rows, group_sizes, weights, kept, upstream, activation):
    forms = functools.partial(_block_loops.mlp_backward, vjp=jax.vjp), composed_backward
    inputs = rows, group_sizes, weights, kept, upstream
    return _mlp_by_platform(*forms, *inputs, activation=activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_mlp(activation, rows, group_sizes, weights):
    return mlp_forward(rows, group_sizes, weights, activation, False)[0]


def _forward_and_residuals(activation, rows, group_sizes, weights):
    outputs, kept = mlp_forward(rows, group_sizes, weights, activation, True)
    return outputs, (rows, group_sizes, weights, kept)


def _gradients(activation, residuals, upstream):
    rows, group_sizes, weights, kept = residuals
    dx, dw = mlp_backward(rows, group_sizes, weights, kept, upstream, activation)
    return dx, None, dw


_grouped_mlp.defvjp(_forward_and_residuals, _gradients)


def grouped_mlp(rows, group_sizes, weights, activation):
    """See `keras_moe.ops.grouped_mlp`."""
    return _grouped_mlp(activation, rows, group_sizes, weights)
