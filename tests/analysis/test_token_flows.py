import itertools

import numpy as np
import pytest

from keras_moe.analysis import flow_statistics, token_flows
from keras_moe.analysis.main_flows import main_flows
from keras_moe.analysis.plots.figure import figure_svg
from keras_moe.analysis.plots.report_flows import draw_flows
from keras_moe.analysis.tokens import main_experts
from keras_moe.ops import Routing

pytestmark = pytest.mark.backend_free


def routing(combined):
    combined = np.asarray(combined, "float32")
    return Routing(*[combined] * 4, (combined > 0).astype("float32"), combined)


def test_flows_by_hand():
    first = routing([[[0.9, 0.1], [0.0, 0.4], [0.0, 0.0], [0.5, 0.5]]])
    second = routing([[[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]])
    assert main_experts(first).tolist() == [[0, 1, 2, 0]]
    flows = token_flows(first, second)
    assert flows.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]]
    mask = np.array([[True, True, False, False]])
    assert token_flows(first, second, mask).sum() == 2
    with pytest.raises(ValueError, match="\\(1, 4\\) and \\(1, 1\\)"):
        token_flows(first, routing(np.ones((1, 1, 2))))


def test_a_served_token_of_weight_0_is_served():
    record = routing(np.zeros((1, 1, 3)))._replace(dispatched=np.array([[[0, 0, 1]]]))
    assert main_experts(record).tolist() == [[2]]


def test_statistics_of_flows_by_hand():
    independent = flow_statistics([[4, 4, 0], [4, 4, 0], [0, 0, 0]])
    assert independent.information == pytest.approx(0.0, abs=1e-12)
    # Eight tokens of an expert: four and four meet again.
    assert independent.kept_company == pytest.approx(2 * 2 * 4 * 3 / (2 * 8 * 7))
    assert independent.company_by_chance == pytest.approx(2 * 8 * 7 / (16 * 15))
    fixed = flow_statistics([[0, 8, 0], [8, 0, 0], [0, 0, 0]])
    assert fixed.information == pytest.approx(1.0)
    assert fixed.kept_company == 1.0
    # One expert for all says nothing; one token has no company.
    assert flow_statistics([[4, 0], [4, 0]]).information == 0.0
    assert flow_statistics([[1, 0], [0, 0]]) == (0.0, 0.0, 0.0)
    assert flow_statistics(np.zeros((2, 2))) == (0.0, 0.0, 0.0)


def test_ribbons_fill_their_nodes():
    rng = np.random.default_rng(0)
    flows = [rng.integers(0, 9, (5, 5))]
    flows.append(np.diag(flows[0].sum(axis=0)))
    picture = main_flows(flows, min_share=0.0)
    assert picture.shown == pytest.approx(1.0)
    for layer, column in enumerate(picture.columns):
        assert column[0].bottom + column[0].height == pytest.approx(1.0)
        assert column[-1].bottom == pytest.approx(0.0)
        assert column[-1].name == "none"
        for number, node in enumerate(column):
            leaving = [
                ribbon.height
                for ribbon in picture.ribbons
                if (ribbon.layer, ribbon.source) == (layer, number)
            ]
            arriving = [
                ribbon.end_height
                for ribbon in picture.ribbons
                if (ribbon.layer + 1, ribbon.target) == (layer, number)
            ]
            for heights, exists in ((leaving, layer < 2), (arriving, layer > 0)):
                if exists:
                    assert sum(heights) == pytest.approx(node.height)
    # The second step goes straight on: no ribbon crosses another.
    names = [[node.name for node in column] for column in picture.columns]
    assert names[1] == names[2]


def test_many_experts_are_bounded():
    rng = np.random.default_rng(0)
    flows = [rng.integers(1, 9, (33, 33)) for _ in range(23)]
    # Layers have the same tokens.
    for before, after in itertools.pairwise(flows):
        after[:] = np.diag(before.sum(axis=0))
    picture = main_flows(flows, max_experts=16)
    assert max(map(len, picture.columns)) <= 18
    assert len(picture.ribbons) <= 300
    assert 0.0 < picture.shown < 1.0
    assert "rest" in [node.name for node in picture.columns[0]]
    names = ["<script>", *(f"$block_{number}$" for number in range(23))]
    figure = draw_flows(picture, names)
    assert figure.get_size_inches()[0] <= 3.6
    svg = figure_svg(figure)
    assert "<script>" not in svg
    assert "$block_0$" in svg
    assert len(svg) < 250_000


def test_flows_of_nothing():
    picture = main_flows([np.zeros((3, 3))])
    assert picture.columns == [[], []]
    draw_flows(picture, ["one", "two"])
    with pytest.raises(ValueError, match="received: none"):
        main_flows([])
    with pytest.raises(ValueError, match="2 layers; received: names=\\['one'\\]"):
        draw_flows(picture, ["one"])
