"""The study's parts about heads, on a few steps, and Table 8."""

import json

import numpy as np
import pytest

from tests.tools.studies.small_mumoe import make_small
from tools.studies import mumoe_heads

TINY = ["--epochs", "3", "--seeds", "1", "--experts", "2", "--rank", "4"]
TINY += ["--learning-rate", "0.01"]


@pytest.fixture
def study(program, monkeypatch):
    make_small(monkeypatch)
    capacities = {
        "CP": [{"factorization": "cp", "rank": 4}],
        "dense": [2],
        "sparse": [2],
    }
    monkeypatch.setattr(mumoe_heads, "CAPACITIES", capacities)
    monkeypatch.setattr(mumoe_heads, "BATCH_SIZE", 32)
    return lambda *arguments: program("mumoe", *arguments)


def test_table_8_by_command(study, tmp_path):
    _, text, _ = study("--parts", "costs", "--output", tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["costs"]
    for name, naive, factorized in (("CP", 155.1, 1.44), ("TR", 622.8, 3.56)):
        assert round(rows[name]["naive"] / 1e9, 1) == naive
        assert round(rows[name]["factorized"] / 1e6, 2) == factorized
    assert "155.1B" in text
    assert "622.8B" in text


def test_heads_are_trained_drawn_and_not_repeated(study, tmp_path, monkeypatch):
    parts = ["activation", "normalization", "matched", "capacity"]
    arguments = ["--parts", *parts, "--output", tmp_path, *TINY]
    status, text, errors = study(*arguments)
    assert status == 0, errors
    assert "Figure 24" in text
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

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(mumoe_heads.Heads, "train", interrupt)
    assert study(*arguments).status == 0


def test_a_sparse_gate_leaves_the_largest():
    gates = np.array(mumoe_heads.top_1_softmax(np.log([[1.0, 3.0, 4.0]])))
    np.testing.assert_allclose(gates, [[0.0, 0.0, 0.5]], rtol=1e-6)
