"""The report's figures of queues and of transitions, which are bounded."""

import itertools

import numpy as np
import pytest

from keras_moe.analysis.plots.figure import figure_svg
from keras_moe.report import _figures as figures
from keras_moe.report.sections.transitions import draw_flows, main_flows


def test_pictures_of_queues_are_bounded():
    names = [f"block_{number}_$x^2$" for number in range(24)]
    edges = np.linspace(0, 3, 25)
    counts = np.ones((24, 3, 24))
    for figure in (
        figures.draw_queues(counts, edges, names, ["$a$", "<b>", "c"]),
        figures.draw_priorities(counts[:, 0], counts[:, 1], edges / 3, names),
        figures.draw_positions(np.zeros((24, 7, 7)), names),
        figures.draw_drops([0.5, 1.0], np.zeros((24, 2)), names, [1.05]),
    ):
        assert figure.get_size_inches()[0] <= 3.6
        svg = figure_svg(figure)
        assert len(svg) < 120_000
        assert "block_0_$x^2$" in svg
        assert "<b>" not in svg


def test_ribbons_fill_their_nodes():
    rng = np.random.default_rng(0)
    flows = [rng.integers(0, 9, (5, 5))]
    flows.append(np.diag(flows[0].sum(axis=0)))
    picture = main_flows(flows, min_share=0.0)
    assert picture.shown == pytest.approx(1.0)
    for layer, column in enumerate(picture.columns):
        assert column[0].bottom + column[0].height == pytest.approx(1.0)
        assert column[-1].bottom > -1e-6
        assert column[-1].name == "none"
        for number, node in enumerate(column):
            leaving = [
                ribbon.height
                for ribbon in picture.ribbons
                if (ribbon.layer, ribbon.source) == (layer, number)
            ]
            arriving = [
                ribbon.height
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
