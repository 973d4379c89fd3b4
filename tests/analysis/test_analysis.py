import json

import numpy as np
import pytest
from rich.console import Console

from keras_moe.analysis import (
    expert_views,
    plots,
    print_statistics,
    routing_statistics,
)
from keras_moe.ops import Routing

pytestmark = pytest.mark.backend_free


def routing(combined, gates=None):
    combined = np.asarray(combined, "float32")
    gates = combined if gates is None else np.asarray(gates, "float32")
    served = (combined > 0).astype("float32")
    return Routing(gates, gates, gates, gates, served, combined)


def test_statistics_by_hand():
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


def test_masked_tokens_do_not_count():
    record = routing([[[0.9, 0.0], [0.0, 0.0]]])
    mask = np.array([[True, False]])
    assert routing_statistics(record, 1, mask).dropped_tokens == 0
    with pytest.raises(ValueError, match="at least one token"):
        routing_statistics(record, 1, np.zeros((1, 2), bool))
    with pytest.raises(ValueError, match="shape=\\(2, 2\\)"):
        routing_statistics(Routing(*[np.zeros((2, 2))] * 6), 1)


def test_balanced_and_single_experts():
    assert routing_statistics(routing(np.ones((1, 3, 2))), 2).load_entropy == 1
    assert routing_statistics(routing(np.ones((1, 3, 1))), 1).load_entropy == 1


def test_the_table_names_each_block(capsys):
    console = Console(width=120)
    record = routing(np.ones((1, 3, 2)))
    print_statistics({"block_7": routing_statistics(record, 2)}, console)
    output = capsys.readouterr().out
    assert "block_7" in output
    assert "50 50" in output


def test_views_leave_the_class_token_out():
    combined = np.zeros((2, 5, 2))
    combined[0, 0, 0] = 1.0  # the class token
    combined[1, 4, 0] = 0.5  # the last patch
    first, second = expert_views(routing(combined), (2, 2), images_per_expert=1)
    np.testing.assert_array_equal(first.position_shares, [[0, 0], [0, 0.5]])
    assert first.images.tolist() == [1]
    np.testing.assert_array_equal(first.patches[0], [[False, False], [False, True]])
    assert second.position_shares.max() == 0
    with pytest.raises(ValueError, match="grid=\\(3, 3\\)"):
        expert_views(routing(combined), (3, 3))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_is_drawn(tmp_path, channels):
    generator = np.random.default_rng(0)
    combined = generator.random((6, 5, 3)) * (generator.random((6, 5, 3)) > 0.5)
    images = generator.uniform(-1, 1, (6, 8, 8, channels))
    path = tmp_path / "experts.png"
    plots.plot_expert_views(
        images, routing(combined), (2, 2), path, images_per_expert=4
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="6 records"):
        plots.plot_expert_views(images[:5], routing(combined), (2, 2), path)
    with pytest.raises(ValueError, match="shape=\\(6, 8, 8\\)"):
        plots.plot_expert_views(images[..., 0], routing(combined), (2, 2), path)
