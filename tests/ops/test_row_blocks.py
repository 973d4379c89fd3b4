"""Rows of several devices: their plan by hand, and who sends what in which round."""

import keras
import numpy as np
import pytest

from keras_moe import ops
from keras_moe.ops._row_blocks import RowBlocks, in_blocks, rows_per_round
from tests.compare import assert_close, assert_same


def plan_of(experts, **options):
    """Each token's only expert, by gates of 0.5 for it."""
    gates = np.eye(3, dtype="float32")[experts] / 2
    return ops.dropless_token_choice(gates, gates, 1, **options)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a form of JAX alone")
def test_each_device_sorts_its_own_tokens():
    # Two devices have two groups of two tokens each.
    experts = np.array([[2, 0], [0, 1], [1, 1], [2, 0]])
    mask = np.ones((4, 2), "bool")
    mask[3, 0] = False
    plan = plan_of(experts, mask=mask)
    blocks = in_blocks(plan, 2)
    assert_same(blocks.row_tokens, [[1, 2, 3, 0], [3, 0, 1, -1]])
    assert_same(blocks.token_rows[..., 0], [[3, 0, 1, 2], [1, 2, -1, 0]])
    assert_same(blocks.group_sizes, [[2, 1, 1], [1, 2, 0]])
    tokens = np.arange(1.0, 9.0, dtype="float32").reshape(4, 2, 1)
    rows = blocks.dispatch(tokens)
    assert_same(rows[..., 0], [[2, 3, 4, 1], [8, 5, 6, 0]])
    # What is not routed is not read.
    outputs = np.array(rows)
    outputs[1, 3] = np.nan
    expected = np.where(mask[..., None], tokens / 2, 0)
    assert_close(blocks.combine(outputs), expected, 1e-6)


def test_what_has_no_blocks_stays():
    plan = plan_of(np.array([[2, 0, 1]]))
    assert in_blocks(plan, 2) is plan
    gates = np.full((2, 2, 4), 0.25, "float32")
    limited = ops.token_choice(gates, gates, 1, capacity=2)
    assert in_blocks(limited, 2) is limited
    mixed = ops.dropless_token_choice(gates, gates, 1, in_place_experts=1)
    assert isinstance(mixed, ops.HeterogeneousPlan)
    blocks = in_blocks(mixed, 2)
    assert isinstance(blocks.plan, RowBlocks)
    assert blocks.in_place is mixed.in_place


def test_room_for_a_quarter_more():
    # In tiles of 8, at most all rows of all devices, and no more without an exchange.
    assert rows_per_round(100, 4) == 128
    assert rows_per_round(3, 2) == 6
    assert rows_per_round(100, 1) == 100


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="an exchange of JAX")
def test_rounds_by_hand():
    import jax

    from keras_moe.ops.kernels._exchange_jax import Queues

    # Two devices' rows of four experts, of which each has two, in rounds of four.
    counts = np.array([[3, 1, 0, 2], [1, 1, 2, 0]], "int32")
    queues = Queues(jax.numpy.asarray(counts), 4, "expert")
    # Device 0 gets 3 + 1 rows of its first expert and 1 + 1 of its second.
    assert queues.busiest == 6
    first, second, third = map(queues.round, range(3))
    assert_same(first.sizes, [[3, 0, 0, 2], [1, 0, 2, 0]])
    assert_same(first.starts[first.sizes > 0], [0, 4, 0, 2])
    assert_same(first.places[first.sizes > 0], [0, 2, 3, 0])
    assert_same(second.sizes, [[0, 1, 0, 0], [0, 1, 0, 0]])
    assert_same(second.starts[:, 1], [3, 1])
    assert_same(second.places[:, 1], [0, 1])
    assert not third.sizes.any()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="an exchange of JAX")
def test_an_expert_may_have_several_rounds():
    import jax

    from keras_moe.ops.kernels._exchange_jax import Queues

    # 5 + 4 rows of one expert, in rounds of four: 4, 1 + 3 and 1.
    counts = np.array([[5, 0], [4, 0]], "int32")
    queues = Queues(jax.numpy.asarray(counts), 4, "expert")
    rounds = [queues.round(i) for i in range(3)]
    assert [x.sizes[:, 0].tolist() for x in rounds] == [[4, 0], [1, 3], [0, 1]]
    assert [x.starts[:, 0].tolist() for x in rounds[:2]] == [[0, 0], [4, 0]]
    assert rounds[1].places[:, 0].tolist() == [0, 1]
    assert (rounds[2].starts[1, 0], rounds[2].places[1, 0]) == (3, 0)
