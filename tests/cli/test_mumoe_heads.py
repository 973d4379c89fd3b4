"""The study's parts about heads, on a few steps, and Table 8."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--epochs", "3", "--seeds", "1", "--experts", "2", "--rank", "4"]
TINY += ["--learning-rate", "0.01"]

pytestmark = pytest.mark.backend_free


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = runpy.run_path(str(ROOT / "tools" / "mumoe_study.py"))
    small = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "mlp_dim": 8}
    tool["main"].__globals__.update(
        SIZES=small, TRAIN_NUMBERS=400, TEST_NUMBERS=100, SHARES=(0.5,)
    )
    heads = tool["mumoe_heads"]
    capacities = {
        "CP": [{"factorization": "cp", "rank": 4}],
        "dense": [2],
        "sparse": [2],
    }
    monkeypatch.setattr(heads, "CAPACITIES", capacities)
    monkeypatch.setattr(heads, "BATCH_SIZE", 32)
    return tool


def test_table_8_by_command(study, tmp_path, capsys):
    assert study["main"](["--parts", "costs", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["costs"]
    for name, naive, factorized in (("CP", 155.1, 1.44), ("TR", 622.8, 3.56)):
        assert round(rows[name]["naive"] / 1e9, 1) == naive
        assert round(rows[name]["factorized"] / 1e6, 2) == factorized
    text = capsys.readouterr().out
    assert "155.1B" in text
    assert "622.8B" in text


def test_heads_are_trained_drawn_and_not_repeated(study, tmp_path, capsys):
    parts = ["activation", "normalization", "matched", "capacity"]
    arguments = ["--parts", *parts, "--output", str(tmp_path), *TINY]
    assert study["main"](arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["activation"]) == ["entmax, 2", "softmax, 2"]
    assert list(results["normalization"]) == ["batch norm, 2", "none, 2"]
    # One and the same run.
    (entmax,), (norm,) = (
        results["activation"]["entmax, 2"],
        results["normalization"]["batch norm, 2"],
    )
    assert entmax == norm
    assert len(list((tmp_path / "runs").glob("head-*.json"))) == 3 + 4 + 3
    matched = results["matched"]
    assert list(matched) == ["linear", "CP, 2", "TR, 2", "Tucker, 2"]
    (linear,) = matched["linear"]
    assert linear["parameters"] == 17 * 100
    for name in list(matched)[1:]:
        (run,) = matched[name]
        assert 1 <= run["parameters"] / linear["parameters"] < 1.2
        assert run["expert_rank"] >= 1
    capacity = results["capacity"]
    assert capacity["dense, 2"][0]["parameters"] == 2 * 17 * 100 + 2 * 16
    assert capacity["sparse, 2"][0]["parameters"] == 2 * 17 * 100 + 2 * 16
    for part in ("matched", "capacity"):
        assert (tmp_path / f"{part}.png").stat().st_size > 5_000
    study["mumoe_heads"].Heads.fit = None
    assert study["main"](arguments) == 0
    assert "Figure 24" in capsys.readouterr().out


def test_a_sparse_gate_leaves_the_largest(study):
    gates = np.array(study["mumoe_heads"].top_1_softmax(np.log([[1.0, 3.0, 4.0]])))
    np.testing.assert_allclose(gates, [[0.0, 0.0, 0.5]], rtol=1e-6)
