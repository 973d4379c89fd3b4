"""The report on layers that have lost experts.

Axes: E experts.
"""

import json

import numpy as np
import pytest

from keras_moe import analysis, models
from keras_moe.analysis.report.counts import demand
from keras_moe.analysis.report.section import Block
from keras_moe.analysis.report.subject import make_subject
from keras_moe.ops import Routing
from tests.small_models import SMALL, images, with_weights

pytestmark = pytest.mark.backend_free
METHODS = ["router_drop", "router_pred_skip", "router_pred"]


@pytest.fixture(scope="module")
def model():
    fields = {**SMALL, "image_shape": (16, 8, 3), "num_classes": 3}
    return with_weights(models.from_preset("vmoe_s32", load_weights=False, **fields))


def pruned(model, method, removed):
    change = analysis.prune_experts if removed else analysis.mask_experts
    return change(model, {"block_1": [1, 3]}, method)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("method", ["router_drop", "router_pred_skip", "router_pred"])
def test_a_report_on_pruned_layers(model, tmp_path, method, removed):
    subject = make_subject(smaller := pruned(model, method, removed))
    (block,) = subject.blocks.values()
    # A smaller router numbers its experts anew.
    is_new = removed and method == "router_drop"
    kinds = ("ffn", "ffn") if is_new else ("pruned", "ffn", "pruned", "ffn")
    assert block.expert_types == kinds
    written = analysis.report(
        smaller, (images(5, 16, 8, 3), np.arange(5) % 3), tmp_path / "r", verbose=0
    )
    sections = json.loads(written.data.read_text())["sections"]
    load = sections["loads"]["block_1"]
    assert (
        np.flatnonzero(load["served"]).tolist()
        == np.flatnonzero(block.is_present).tolist()
    )
    assert load["entropy"] == pytest.approx(
        -sum(p * np.log2(p) for p in load["shares"] if p), abs=1e-6
    )
    # Nobody wonders that pruned experts are idle, or takes them away again.
    assert not any("no token" in verdict.text for verdict in written.verdicts)
    page = written.page.read_text(encoding="utf-8")
    assert ("4 (2 pruned)" in page) == (not is_new)


@pytest.mark.parametrize("method", ["router_drop", "router_pred_skip", "router_pred"])
def test_choices_of_pruned_experts(method):
    kinds = ("ffn", "pruned", "ffn")
    block = Block("b", "b", "image", "token_choice", kinds, 1, 1.0, None, None, method)
    affinity = np.array([[[0.3, 0.6, 0.1], [0.7, 0.2, 0.1]]])
    served = np.array([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    record = Routing(*[affinity] * 4, served, served)
    chosen = demand(block, record, np.ones((1, 2), bool))
    moved = [0.0, 0.0, 0.0] if method == "router_pred_skip" else [1.0, 0.0, 0.0]
    assert chosen.tolist() == [moved, [1.0, 0.0, 0.0]]
