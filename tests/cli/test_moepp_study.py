"""The study of MoE++ on a few steps: what it counts, stores and draws."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--tokens", "32", "--dim", "8", "--mlp-dim", "16", "--rounds", "1"]
ONE = ["--epochs", "1", "--seeds", "1", "--batch-size", "64"]

pytestmark = pytest.mark.backend_free


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    tool = runpy.run_path(str(ROOT / "tools" / "moepp_study.py"))
    # The paper's sizes take seconds here.
    tool["main"].__globals__.update(PAPER_MLP=16, PAPER_TOKENS=2048)
    return tool


def test_costs_are_the_papers(study):
    parser_args = type("Args", (), {"taus": [0.75, 0.25], "selected": 2})
    study["costs"].__globals__["expert_costs"] = lambda args: {}
    found = study["costs"](study["ExpertKinds"](8, 1, 1, 2), parser_args)
    # Table 1 and Table B.
    assert found["ffn_share"] == pytest.approx({"0.75": 0.6, "0.25": 1 / 3})
    assert found["router_operations"] == {
        "original": 50_331_648,
        "pathway-aware": 50_888_704,
    }


def test_speed_and_its_table(study, tmp_path, capsys):
    arguments = ["--parts", "speed", "--taus", "0.5", "--output", str(tmp_path), *TINY]
    assert study["main"](arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["speed"]["forms"]["limited"]
    assert rows["0.5"]["by_flops"] == pytest.approx(1.0)
    assert rows["0.5"]["seconds"] > 0
    assert "Table 3" in capsys.readouterr().out


def test_training_is_stored_drawn_and_not_repeated(study, tmp_path, capsys):
    arguments = ["--parts", "training", "--output", str(tmp_path), *TINY, *ONE]
    arguments += ["--only", "tau=0.75", "no gating residuals"]
    assert study["main"](arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["training"]["rows"]
    assert list(rows) == ["tau=0.75", "no gating residuals"]
    row = rows["tau=0.75"]
    assert 0 < row["ffn_experts_per_token"]["mean"] < 2
    assert sum(row["loads"]["block_0"]["shares"].values()) == pytest.approx(1.0)
    for name in ("compute", "loads", "scores"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    # Damaged files are trained again; the parts that are there stay.
    (stored,) = (tmp_path / "runs").glob("tau*.npz")
    stored.write_bytes(stored.read_bytes()[:100])
    assert study["main"](arguments) == 0
    # What is whole is not trained again.
    study["main"].__globals__["Training"].train = None
    assert study["main"](arguments) == 0
    assert "FFN per token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "training", "--only", "tau=7"], "tau=7"),
        (["--parts", "speed", "--kinds", "0", "1", "1", "2"], "num_experts=0"),
    ],
)
def test_bad_arguments_end_with_a_line(study, tmp_path, capsys, arguments, message):
    assert study["main"]([*arguments, "--output", str(tmp_path), *TINY]) == 1
    assert message in capsys.readouterr().err
