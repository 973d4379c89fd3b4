"""What JAX computes on TPUs in its own way, against the forms of other platforms."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import _rows, dropless_token_choice, expert_choice, token_choice
from keras_moe.ops.plans import SlotPlan, in_tiles
from keras_moe.ops.token_choice import PRIORITIES, fill_slots, invert
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs
from tests.ops.programs import BACKEND, normal, rounded

pytestmark = pytest.mark.every_backend
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="kernels of JAX")
# Slots of two groups with 5 tokens: several of a token, none of it, and empty ones.
OWNERS = np.array([[0, 3, -1, 0, 4, 3], [-1, 2, 2, 2, 1, -1]], "int32")


def lowered(function, *inputs):
    """The program that JAX hands to a TPU's compiler."""
    import jax

    from keras_moe._backends.jax import traced_for

    with traced_for("tpu"):
        traced = jax.jit(function).trace(*inputs)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@on_jax
@pytest.mark.parametrize("kind", ["first come", "ties", "numbers", "NaN"])
@pytest.mark.parametrize(
    "sizes", [(2, 6, 2, 4, 3, 2), (1, 600, 2, 5, 4, 400), (3, 1, 3, 6, 5, 2)]
)
def test_queues_by_counting(sizes, kind):
    import jax

    from keras_moe.ops.kernels._tpus_jax import by_counting

    groups, tokens, selected, *queues = sizes
    generator = np.random.default_rng(0)
    experts = generator.integers(queues[0], size=(groups, tokens, selected))
    rank = {
        "first come": None,
        "ties": generator.integers(3, size=(groups, tokens)),
        "numbers": normal(1, groups, tokens),
        "NaN": np.where(normal(1, groups, tokens) > 0, np.nan, normal(2, tokens)),
    }[kind]
    inputs = experts.astype("int32"), rank
    actual, expected = (
        jax.jit(form, static_argnums=(2, 3, 4))(*inputs, *queues)
        for form in (by_counting, fill_slots)
    )
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert_same(actual, expected)


@on_jax
@pytest.mark.parametrize("size", [0, 1, 128, 1000])
def test_inverse_by_matmul(size):
    from keras_moe.ops.kernels._tpus_jax import invert_by_matmul

    permutation = np.random.default_rng(0).permutation(size).astype("int32")
    actual = invert_by_matmul(permutation)
    assert actual.dtype == invert(permutation).dtype
    assert_same(actual, invert(permutation))


@on_jax
def test_token_choice_on_a_tpu_neither_sorts_nor_scatters():
    gates = normal(0, 2, 6, 4)
    for name in PRIORITIES:
        program = lowered(lambda x, name=name: token_choice(x, x, 2, 3, name), gates)
        assert "stablehlo.dot_general" in program
        assert "stablehlo.sort" not in program
        assert "stablehlo.scatter" not in program
    program = lowered(lambda x: dropless_token_choice(x, x, 2), gates)
    assert "stablehlo.scatter" not in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_slots_and_gradients(dtype):
    tokens, rows = rounded(normal(1, 2, 5, 3)), normal(2, 2, 6, 3)
    to_slots, to_tokens = rounded(normal(3, 2, 6, 3)), rounded(normal(4, 2, 5, 3))

    def run(tokens, rows):
        owners = ops.convert_to_tensor(OWNERS)
        taken = _rows.gather_slots(ops.cast(tokens, dtype), owners)
        total = _rows.add_slots(rows, owners, 5, dtype)
        names = [keras.backend.standardize_dtype(x.dtype) for x in (taken, total)]
        assert names == [dtype, dtype]
        taken, total = ops.cast(taken, "float32"), ops.cast(total, "float32")
        loss = ops.sum(ops.multiply(taken, to_slots))
        loss = loss + ops.sum(ops.multiply(total, to_tokens))
        return loss, [ops.stop_gradient(x) for x in (taken, total)]

    gradients, moved = gradient_and_outputs(run, tokens, rows)
    expected = [np.zeros_like(x) for x in (rows, tokens, tokens, rows)]
    for group, slot in np.argwhere(OWNERS >= 0):
        token = group, OWNERS[group, slot]
        expected[0][group, slot] = tokens[token]
        expected[1][token] += rows[group, slot]
        expected[2][token] += to_slots[group, slot]
        expected[3][group, slot] = to_tokens[token]
    tolerance = 1e-6 if dtype == "float32" else 2**-6
    assert_close([*moved, *gradients], expected, tolerance, tolerance)


@on_jax
def test_slots_by_matmul():
    from keras_moe.ops.kernels._tpus_jax import by_matmul

    rows = rounded(normal(1, 2, 6, 3))
    expected = _rows.sum_slots(rows, OWNERS, 5)
    assert_close(by_matmul(rows, OWNERS, 5), expected, 1e-6, 1e-6)


@on_jax
def test_expert_choice_on_a_tpu_scatters_no_rows_of_bfloat16():
    import jax

    owners = OWNERS.reshape(2, 2, 3)
    fields = owners, np.zeros((2, 5, 2), "int32"), normal(1, 2, 2, 3)

    def loss(tokens):
        plan = SlotPlan(*map(ops.convert_to_tensor, fields))
        return ops.sum(plan.combine(2.0 * plan.dispatch(tokens)))

    tokens = ops.cast(normal(2, 2, 5, 3), "bfloat16")
    assert "stablehlo.scatter" not in lowered(jax.grad(loss), tokens)


@pytest.mark.parametrize("kind", ["token", "in place", "expert"])
def test_slots_in_whole_tiles_move_the_same_tokens(kind):
    gates = np.abs(normal(0, 2, 40, 4))
    if kind == "expert":
        plan = expert_choice(gates, gates, 15)
    else:
        in_place = {"in_place_experts": 1, "in_place_capacity": 9}
        plan = token_choice(gates, gates, 2, 15, **in_place if kind != "token" else {})
    tiled = in_tiles(plan)
    tokens = normal(1, 2, 40, 3)
    slots, tiles = (ops.convert_to_numpy(x.dispatch(tokens)) for x in (plan, tiled))
    assert tiles.shape == (2, slots.shape[1], 16, 3)
    assert_same(tiles[:, :, :15], slots)
    assert not tiles[:, :, 15:].any()
    tiles[:, :, 15:] = 7.0  # as biases would
    assert_same(tiled.combine(tiles), plan.combine(slots))
    assert_same(tiled.assignments(), plan.assignments())
    assert in_tiles(tiled).dispatch(tokens).shape[2] == 16
    few = token_choice(gates, gates, 2, 7)
    assert in_tiles(few) is few


@on_jax
def test_cholesky_solves_as_keras_does():
    from keras_moe._backends.jax import solve

    factors, columns = normal(1, 3, 8, 8), normal(2, 3, 8, 1)
    matrices = factors @ factors.swapaxes(1, 2) + np.eye(8, dtype="float32")
    actual = solve(matrices, columns)
    assert_close(actual, ops.solve(matrices, columns), 1e-4, 1e-5)
    matrices[1, 0, 0] = np.nan
    actual = solve(matrices, columns)
    assert_same(np.isnan(actual).any(axis=(1, 2)), [False, True, False])
