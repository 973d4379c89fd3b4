"""Compute by token, load by type and routing scores, on records made by hand."""

import numpy as np
import pytest

from keras_moe import analysis
from keras_moe.ops import ExpertTypes, Routing

TYPES = ExpertTypes(ffn=2, zero=1, copy=1)
# One image of a class token and 1 x 2 patches; FFN, FFN, zero, copy.
FIRST = np.array([[[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]], "float32")
SECOND = np.array([[[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]]], "float32")


def record(dispatched):
    return Routing(*[dispatched] * 6)


def test_experts_of_each_type_per_token():
    layers = {"block_0": record(FIRST), "block_1": record(SECOND)}
    np.testing.assert_array_equal(
        analysis.experts_per_token(layers["block_0"], TYPES), [[2, 1, 0]]
    )
    for kind, expected in (
        ("ffn", [[2, 1, 0]]),
        ("zero", [[0, 0.5, 0.5]]),
        ("copy", [[0, 0.5, 1]]),
        ("constant", [[0, 0, 0]]),
    ):
        np.testing.assert_array_equal(
            analysis.experts_per_token(layers, TYPES, kind), expected
        )
    np.testing.assert_array_equal(
        analysis.compute_map(layers, TYPES, (1, 2), "zero"), [[[0.5, 0.5]]]
    )


def test_load_by_type():
    loads = analysis.load_by_type({"a": record(FIRST), "b": record(SECOND)}, TYPES, 2)
    assert loads["a"].shares == pytest.approx(
        {"ffn": 3 / 6, "zero": 2 / 6, "copy": 1 / 6, "constant": 0.0}
    )
    assert loads["a"].dropped_choices == pytest.approx(0.0)
    # One choice of the last token found no room.
    assert loads["b"].dropped_choices == pytest.approx(1 / 6)
    assert loads["b"].experts_per_token["ffn"] == pytest.approx(1.0)
    mask = np.array([[True, True, False]])
    masked = analysis.load_by_type({"b": record(SECOND)}, TYPES, 2, mask)["b"]
    assert masked.dropped_choices == pytest.approx(0.0)


def test_routing_scores():
    gates = np.array([[[0.5, 0.1, 0.4], [0.2, 0.7, 0.1]]])
    scores = analysis.routing_scores(record(gates))
    np.testing.assert_allclose(scores.highest, [0.5, 0.7])
    np.testing.assert_allclose(scores.second, [0.4, 0.2])
    actual = scores.to_dict()
    assert actual["highest_variance"] == pytest.approx(0.01)
    assert actual["second_mean"] == pytest.approx(0.3)
