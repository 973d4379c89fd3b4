"""The tables of the studies of LIMoE and CLIP-UP, and their figures, by hand."""

import math

import numpy as np
import pytest

from keras_moe import losses
from keras_moe.ops import Routing
from keras_moe.training import Recipe
from tools.studies import clip_up, limoe
from tools.studies.pairs import health_figures, modality_figures

LOSSES = "model.auxiliary_losses"
CLASSIC = [("importance", None), ("load", None), ("router_z", None)]


@pytest.fixture(scope="module")
def base():
    """LIMoE-B/16 of the paper's ablations: 32 experts, 9 of text, 20 of images."""
    model = {"preset": "limoe_b16"}
    return limoe.base_of(recipe(model=model, data={"batch_size": 64}))


def recipe(**sections):
    sections = {
        "data": {"batch_size": 64},
        "model": {"preset": "clip_up_b32"},
        "schedule": {"epochs": 440, "learning_rate": 1e-3, "warmup_steps": 44},
        **sections,
    }
    return Recipe("mine", **sections)


def names(overrides):
    """The losses of a row, each with its modality."""
    made = losses.get(overrides[LOSSES])
    return [(x.name, x.get_config().get("modality")) for x in made]


def test_thresholds_are_logarithms_of_soft_minima(base):
    rows = limoe.threshold_configurations(base, (1, 6.5, 9), (4, 20))
    # The base's own; up to the rounding of a logarithm's exponential.
    assert rows[9, 20] == {}
    assert rows[6.5, 4][LOSSES]["limoe"]["thresholds"] == {
        "text": math.log(6.5),
        "image": math.log(4),
    }
    assert len(rows) == 6


def test_every_other_table_has_its_rows(base):
    # Table 6 has two columns for K = 1, six for the others; figure 5 has six lengths.
    assert len(limoe.selected_configurations(base, (1, 2, 3, 5))) == 2 + 3 * 6
    assert len(limoe.order_configurations(base)) == 5
    assert len(limoe.router_configurations(base, text_pool=5)) == 3
    assert limoe.group_configurations(base)[8] == {"model.examples_per_group": 8}
    assert len(limoe.loss_configurations(base)) == 8
    assert list(limoe.expert_configurations(base)) == [4, 8, 16, 32, 64]
    assert len(limoe.length_configurations(base)) >= 2 * 6


def test_steps_are_shared_as_in_the_paper():
    dense, upcycled = (
        recipe(),
        recipe(schedule={"epochs": 350, "learning_rate": 1e-4, "warmup_steps": 35}),
    )
    own = clip_up.lengths(dense, upcycled)
    assert [x["schedule.epochs"] for x in own] == [440, 350, 790]
    # Only the upcycled model has the smaller learning rate.
    assert own.whole["schedule.learning_rate"] == 1e-3
    assert "schedule.learning_rate" not in own.upcycled
    short = clip_up.lengths(dense, upcycled, 79)
    assert [x["schedule.epochs"] for x in short] == [44, 35, 79]


def test_entropy_losses_weigh_the_same_in_both_backbones():
    own = {"load_balance": 0.01, "router_z": 1e-4}
    shared = clip_up.entropy_losses("shared", own, 16)[LOSSES]
    bag = losses.get(shared)[-3:]
    (each,) = {loss.weight for loss in bag}
    expected = ["local_entropy", "global_entropy", "global_entropy"]
    assert [loss.name for loss in bag] == expected
    towers = clip_up.entropy_losses("separated", own, 4)
    image = {x.name: x for x in losses.get(towers["model.image.auxiliary_losses"])}
    text = {x.name: x for x in losses.get(towers["model.text.auxiliary_losses"])}
    assert set(text) - set(image) == {"local_entropy"}
    for loss in (image["global_entropy"], text["local_entropy"]):
        assert loss.weight == pytest.approx(each)


def test_figures_of_routers_by_hand():
    gates = np.array([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]])
    served = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    record = Routing(gates, gates, gates, gates, served, served)
    figures = modality_figures(
        {"text/block_1": record, "image/block_1": record},
        {"text": np.array([[True, True, False]])},
    )
    assert figures["image_routing_entropy"] == pytest.approx(math.log(2))
    # Without the padding the mean gates are 3/4 and 1/4, and one expert serves all.
    quarter = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert figures["text_routing_entropy"] == pytest.approx(quarter)
    assert figures["text_local_entropy"] == pytest.approx(math.log(2) / 2)
    assert (figures["text_experts"], figures["image_experts"]) == (1, 2)
    assert figures["text_max_gate"] == pytest.approx(0.75)
    layers = [
        {"layer": "text/block_1", "dropped_tokens": 0.2, "expert_shares": [0.5, 0.5]},
        {"layer": "text/block_3", "dropped_tokens": 0.4, "expert_shares": [1.0, 0.0]},
    ]
    assert health_figures(layers) == pytest.approx(
        {"text_dropped": 0.3, "text_dispatched_entropy": math.log(2) / 2}
    )
