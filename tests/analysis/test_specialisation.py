"""Polysemanticity and load, computed by hand."""

import json

import numpy as np
import pytest

from keras_moe import analysis
from keras_moe.analysis import ExpertAblation
from keras_moe.ops import Routing
from tools.studies.mumoe_editing import oversample


def ablation():
    return ExpertAblation(
        experts=np.array([0, 3, 5]),
        counts=np.array([10, 10, 5, 0]),
        accuracy=np.array([1.0, 0.5, 0.8, 0.0]),
        ablated=np.array([[0, 0.5, 0.8, 0], [1.0, 0.25, 0.4, 0], [1.0, 0.5, 0.8, 0]]),
    )


def test_polysemanticity_by_hand():
    actual = ablation()
    np.testing.assert_allclose(
        actual.changes, [[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 0]]
    )
    np.testing.assert_allclose(actual.polysemanticity, [0.0, np.sqrt(0.5), 1.0])
    # The last expert does not matter.
    np.testing.assert_allclose(actual.mean_polysemanticity, np.sqrt(0.5) / 2)
    assert json.loads(json.dumps(actual.to_dict()))["experts"] == [0, 3, 5]
    nobody = actual._replace(ablated=np.tile(actual.accuracy, (3, 1)))
    assert nobody.mean_polysemanticity is None
    actual = ablation()._replace(
        accuracy=np.array([0.5, 0.5]), ablated=np.array([[0.75, 0.25]])
    )
    np.testing.assert_allclose(actual.changes, [[-0.5, 0.5]])
    np.testing.assert_allclose(actual.polysemanticity, [np.sqrt(0.5)])


def test_load_counts_large_coefficients():
    gates = np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.4, 0.6], [1.0, 0.0]]])
    record = Routing(*[gates] * 6)
    assert analysis.expert_load(record).tolist() == [3, 2]
    assert analysis.expert_load(record, 0.95).tolist() == [1, 0]


@pytest.mark.parametrize("count", [3, 4, 7, 12])
def test_oversampling_gives_as_many_members(count):
    members = np.array([True, False, True, False, False, True])
    indices = oversample(members, count, seed=1)
    counts = np.bincount(indices, minlength=6)
    assert counts[members].sum() == count
    assert counts[~members].tolist() == [1, 1, 1]
    assert np.ptp(counts[members]) <= 1
    np.testing.assert_array_equal(indices, oversample(members, count, seed=1))
    assert not np.array_equal(indices, oversample(members, count, seed=2))
