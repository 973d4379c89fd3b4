"""Statistics of routing records and the queues before experts, by hand."""

import json

import numpy as np
import pytest
from rich.console import Console

from keras_moe.analysis import expert_queues, print_statistics, routing_statistics
from keras_moe.analysis.routing import served_at
from keras_moe.ops import Routing, expert_choice, token_choice

# Four tokens, two experts: three prefer the first.
AFFINITY = np.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]], "float32")


def routing(combined, gates=None):
    combined = np.asarray(combined, "float32")
    gates = combined if gates is None else np.asarray(gates, "float32")
    served = (combined > 0).astype("float32")
    return Routing(gates, gates, gates, gates, served, combined)


def test_statistics_by_hand(capsys):
    record = routing(
        [[[0.9, 0, 0, 0], [0.6, 0.4, 0, 0]], [[0, 0, 0, 0], [0.5, 0, 0, 0]]]
    )
    statistics = routing_statistics(record, num_selected_experts=2)
    np.testing.assert_allclose(statistics.expert_shares, [0.75, 0.25, 0, 0])
    assert statistics.dropped_tokens == 0.25
    assert statistics.dropped_choices == 0.5
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    np.testing.assert_allclose(statistics.load_entropy, entropy)
    np.testing.assert_allclose(statistics.mean_max_gate, (0.9 + 0.6 + 0 + 0.5) / 4)
    # The experts' masses are 2.0, 0.4, 0 and 0, of mean 0.6.
    np.testing.assert_allclose(statistics.affinity_imbalance, 2.0 / 0.6 - 1, rtol=1e-6)
    assert routing_statistics(record).dropped_choices is None
    assert json.loads(json.dumps(statistics.to_dict()))["dropped_tokens"] == 0.25
    mask = np.array([[True, True], [False, True]])
    assert routing_statistics(record, 2, mask).dropped_tokens == 0
    print_statistics({"block_7": statistics}, Console(width=120))
    output = capsys.readouterr().out
    assert "block_7" in output
    assert "75 25" in output
    for experts in (1, 2):
        balanced = routing_statistics(routing(np.ones((1, 3, experts))))
        assert balanced.load_entropy == 1


def test_positions_by_hand():
    first_come = expert_queues(AFFINITY, 1)
    assert first_come[0].tolist() == [[0, -1], [1, -1], [2, -1], [-1, 0]]
    by_gate = expert_queues(AFFINITY, 1, priority="max_gate")
    assert by_gate[0].tolist() == [[2, -1], [0, -1], [1, -1], [-1, 0]]
    # Second choices stand behind all first choices.
    both = expert_queues(AFFINITY, 2)
    assert both[0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    by_number = expert_queues(AFFINITY, 1, priority=[[3, 2, 1, 0]])
    assert by_number[0].tolist() == [[2, -1], [1, -1], [0, -1], [-1, 0]]
    # Experts that choose have all tokens in their queue.
    assert expert_queues(AFFINITY)[0].tolist() == [[2, 1], [0, 3], [1, 2], [3, 0]]


def test_masked_and_dropped_tokens_by_hand():
    mask = np.array([[True, False, True, True]])
    positions = expert_queues(AFFINITY, 1, mask=mask)
    assert positions[0].tolist() == [[0, -1], [-1, -1], [1, -1], [-1, 0]]
    positions = expert_queues(AFFINITY, mask=mask)
    assert positions[0].tolist() == [[1, 1], [-1, -1], [0, 2], [2, 0]]
    positions = expert_queues(AFFINITY, 1, "max_gate")
    dropped = [~served_at(positions, x).any(axis=-1)[0] for x in (1, 2, 4)]
    assert np.array(dropped).tolist() == [
        [True, False, True, False],
        [True, False, False, False],
        [False, False, False, False],
    ]


@pytest.mark.parametrize("capacity", [1, 3, 7])
@pytest.mark.parametrize("priority", ["first_come", "max_gate", "sum_gates"])
def test_a_cut_of_the_queue_is_the_plan_at_that_capacity(capacity, priority):
    rng = np.random.default_rng(0)
    affinity = rng.dirichlet(np.ones(32), (6, 9)).astype("float32")
    mask = rng.random((6, 9)) < 0.8
    # Two images compete.
    grouped, group_mask = affinity.reshape(3, 18, 32), mask.reshape(3, 18)
    plan = token_choice(grouped, grouped, 2, capacity, priority, group_mask)
    served = np.array(plan.assignments()[0]).reshape(affinity.shape)
    positions = expert_queues(affinity, 2, priority, 2, mask)
    np.testing.assert_array_equal(served_at(positions, capacity), served > 0)
    plan = expert_choice(grouped, grouped, capacity, group_mask)
    served = np.array(plan.assignments()[0]).reshape(affinity.shape)
    positions = expert_queues(affinity, examples_per_group=2, mask=mask)
    np.testing.assert_array_equal(served_at(positions, capacity), served > 0)
