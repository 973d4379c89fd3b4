import numpy as np
import pytest

from keras_moe.analysis import dropped_at_capacities, expert_queues
from keras_moe.analysis.plots import report_queues as plots
from keras_moe.analysis.plots.figure import faded, figure_svg
from keras_moe.analysis.routing import served_at
from keras_moe.ops import Routing, expert_choice, token_choice

pytestmark = pytest.mark.backend_free

# Four tokens, two experts: three prefer the first.
AFFINITY = np.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]], "float32")


def test_places_by_hand():
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


def test_masked_tokens_do_not_queue():
    mask = np.array([[True, False, True, True]])
    places = expert_queues(AFFINITY, 1, mask=mask)
    assert places[0].tolist() == [[0, -1], [-1, -1], [1, -1], [-1, 0]]
    places = expert_queues(AFFINITY, mask=mask)
    assert places[0].tolist() == [[1, 1], [-1, -1], [0, 2], [2, 0]]


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
    places = expert_queues(affinity, 2, priority, 2, mask)
    np.testing.assert_array_equal(served_at(places, capacity), served > 0)
    plan = expert_choice(grouped, grouped, capacity, group_mask)
    served = np.array(plan.assignments()[0]).reshape(affinity.shape)
    places = expert_queues(affinity, examples_per_group=2, mask=mask)
    np.testing.assert_array_equal(served_at(places, capacity), served > 0)


def test_dropped_tokens_by_hand():
    routing = Routing(*[AFFINITY] * 6)
    dropped = dropped_at_capacities(routing, (0.5, 1.0, 2.0), 1, "max_gate")
    assert dropped[:, 0].tolist() == [
        [True, False, True, False],
        [True, False, False, False],
        [False, False, False, False],
    ]
    mask = np.array([[False, True, True, True]])
    masked = dropped_at_capacities(routing, (0.5,), 1, "max_gate", mask=mask)
    assert masked[0, 0].tolist() == [False, False, True, False]
    assert dropped_at_capacities(routing, (), 1).shape == (0, 1, 4)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="shape=\\(2, 2\\)"):
        expert_queues(np.zeros((2, 2)), 1)
    with pytest.raises(
        ValueError, match=r"divide the batch of 1.*examples_per_group=2"
    ):
        expert_queues(AFFINITY, 1, examples_per_group=2)


def test_pictures_of_queues_are_bounded():
    names = [f"block_{number}_$x^2$" for number in range(24)]
    edges = np.linspace(0, 3, 25)
    counts = np.ones((24, 3, 24))
    for figure in (
        plots.draw_queues(counts, edges, names, ["$a$", "<b>", "c"], "capacity"),
        plots.draw_priorities(counts[:, 0], counts[:, 1], edges / 3, names),
        plots.draw_places(np.zeros((24, 7, 7)), names),
        plots.draw_drops([0.5, 1.0], np.zeros((24, 2)), names, [1.05]),
    ):
        assert figure.get_size_inches()[0] <= 3.6
        svg = figure_svg(figure)
        assert len(svg) < 120_000
        assert "block_0_$x^2$" in svg
        assert "<b>" not in svg


def test_images_fade_by_share():
    image = np.ones((1, 3, 1))
    half = faded(image, np.array([[1.0, 0.5, 0.0]]))
    np.testing.assert_array_equal(half[0, 0], 1.0)
    np.testing.assert_allclose(half[0, 1], (half[0, 0] + half[0, 2]) / 2)
