"""The study of MoE++ on a few steps: what it counts, stores and draws."""

import json

import numpy as np
import pytest
from rich.console import Console

from keras_moe.ops import ExpertTypes
from tests.tools.studies.few_digits import MOEPP, load_few
from tools.studies import moepp_layers
from tools.studies.moepp import deviation_of_patches
from tools.studies.moepp_layers import Costs, Sizes
from tools.studies.study import Study

ONE = ["--epochs", "1", "--seeds", "1", "--batch-size", "64"]


@pytest.fixture
def study(done, monkeypatch):
    # The paper's sizes take seconds here.
    monkeypatch.setattr(moepp_layers, "PAPER_MLP", 16)
    load_few(monkeypatch)
    return lambda *arguments: done("moepp", *arguments)


def test_costs_are_the_papers(monkeypatch, tmp_path):
    monkeypatch.setattr(moepp_layers, "expert_costs", lambda rounds: {})
    sizes = Sizes(ExpertTypes(8, 1, 1, 2), 32, 8, 16, 2, 1.1, False)
    part = Costs(Study(tmp_path, {}, Console()), sizes, [0.75, 0.25], rounds=1)
    results = part.results()
    # Table 1 and Table B.
    assert results["ffn_share"] == pytest.approx({"0.75": 0.6, "0.25": 1 / 3})
    assert results["router_operations"] == {
        "original": 50_331_648,
        "pathway-aware": 50_888_704,
    }


def test_every_other_part(study, tmp_path):
    parts = ["speed", "costs", "removal", "tokens", "constants"]
    arguments = ["--taus", "0.5", "--constants", "1", "--output", tmp_path]
    assert "Table C" in study("--parts", *parts, *arguments, *MOEPP, *ONE)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["costs"]["experts"]) == {"ffn", "zero", "copy", "constant"}
    assert results["costs"]["experts"]["ffn"]["seconds"] > 0
    rows = results["speed"]["forms"]["limited"]
    assert rows["0.5"]["by_flops"] == pytest.approx(1.0)
    assert rows["0.5"]["seconds"] > 0
    counts = results["tokens"]["per_patch"]
    for patch in ("plain", "with an edge"):
        # At inference every choice of the two is served.
        served = sum(counts[kind][patch]["mean"] for kind in counts)
        assert served == pytest.approx(2.0, abs=1e-4)


def test_training_is_stored_and_drawn(study, tmp_path):
    arguments = ["--parts", "training", "--output", tmp_path, *MOEPP, *ONE]
    arguments += ["--only", "tau=0.75", "no gating residuals"]
    text = study(*arguments)
    assert "FFN per token" in text
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["training"]["rows"]
    assert list(rows) == ["tau=0.75", "no gating residuals"]
    row = rows["tau=0.75"]
    assert 0 < row["ffn_experts_per_token"]["mean"] < 2
    assert sum(row["loads"]["block_0"]["shares"].values()) == pytest.approx(1.0)
    for name in ("compute", "loads", "scores"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_plain_patches_have_equal_pixels():
    images = np.zeros((1, 4, 4, 1))
    images[0, 2:, 2:] = [[[-1.0], [1.0]], [[1.0], [-1.0]]]
    deviation = deviation_of_patches(images, (2, 2))
    assert deviation.tolist() == [[[0.0, 0.0], [0.0, 1.0]]]
