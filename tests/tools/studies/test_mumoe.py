"""The study of muMoE on a few steps: what it stores, prints and draws."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe import data
from tools.studies import mumoe, mumoe_editing, mumoe_heads, mumoe_models
from tools.studies.mumoe_models import numbers, with_attributes

TINY = ["--seeds", "1", "--experts", "2", "--rank", "4"]
TINY += ["--learning-rate", "0.01"]


@pytest.fixture
def study(done, monkeypatch):
    """The study at sizes that take seconds."""
    sizes = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "mlp_dim": 8}
    for module in (mumoe, mumoe_editing, mumoe_models):
        monkeypatch.setattr(module, "SIZES", sizes)
    for name, value in {"TRAIN_NUMBERS": 400, "TEST_NUMBERS": 100}.items():
        monkeypatch.setattr(mumoe, name, value)
        monkeypatch.setattr(mumoe_models, name, value)
    monkeypatch.setattr(mumoe_models, "SHARES", (0.5,))

    def load_digits(split, shape):
        return tuple(array[:500] for array in data.load_digits(split, shape))

    few = {"EXPERT_STRENGTHS": (1.0,), "BLIND_STRENGTHS": (2.5,), "PASSES": 1}
    few["data"] = SimpleNamespace(load_digits=load_digits)
    for name, value in few.items():
        monkeypatch.setattr(mumoe_editing, name, value)
    low_rank = [{"factorization": "cp", "rank": 4}]
    capacities = {"CP": low_rank, "dense": [2], "sparse": [2]}
    monkeypatch.setattr(mumoe_heads, "CAPACITIES", capacities)
    monkeypatch.setattr(mumoe_heads, "BATCH_SIZE", 32)
    return lambda *arguments: done("mumoe", *arguments)


def test_data_and_gates_are_those_of_the_study():
    images, labels = numbers("test", 200)
    assert images.shape == (200, 16, 32, 1)
    assert np.bincount(labels).tolist() == [2] * 100
    digits, classes = data.load_digits("test", (16, 16, 1))
    for image, label in zip(images[:20], labels[:20]):
        for half, digit in ((image[:, :16], label // 10), (image[:, 16:], label % 10)):
            known = np.abs(digits - half).max(axis=(1, 2, 3)) == 0
            assert digit in classes[known]
    images = np.ones((2, 4, 4, 1))
    inverted, labels = with_attributes(
        images, np.array([3, 8]), np.array([True, False])
    )
    assert inverted[:, 0, 0, 0].tolist() == [-1, 1]
    # 5 and above, even, with a loop, prime, inverted
    assert labels.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 0, 0]]
    gates = np.array(mumoe_heads.top_1_softmax(np.log([[1.0, 3.0, 4.0]])))
    np.testing.assert_allclose(gates, [[0.0, 0.0, 0.5]], rtol=1e-6)


def test_parts_are_stored_and_drawn(study, tmp_path):
    parts = ["--parts", "specialisation", "editing", "patches"]
    arguments = [*parts, "--output", tmp_path, *TINY, "--epochs", "2"]
    arguments += ["--edited-experts", "2"]
    text = study(*arguments)
    assert "Table 2" in text
    results = json.loads((tmp_path / "results.json").read_text())
    (score,) = results["specialisation"]["heads"]["final 2"]["polysemanticity"]
    assert score >= 0
    (run,) = results["editing"]["runs"]
    plus = ("oversampling", "adversarial", "blind thresh.", "expert edit")
    names = {f"+ {name}" for name in (*plus, "expert edit, N")}
    assert set(run["rows"]) == {"linear", "muMoE"} | names
    for name in ("polysemanticity", "ablation", "svd", "subpopulations"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    assert (tmp_path / "patches_block_0.png").stat().st_size > 3_000


def test_heads_are_trained_and_drawn(study, tmp_path):
    parts = ["activation", "normalization", "matched", "capacity"]
    arguments = ["--parts", *parts, "--output", tmp_path, *TINY, "--epochs", "2"]
    text = study(*arguments)
    assert "Figure 24" in text
    results = json.loads((tmp_path / "results.json").read_text())
    # One and the same run.
    entmax = results["activation"]["entmax, 2"]
    assert entmax == results["normalization"]["batch norm, 2"]
    matched = results["matched"]
    assert list(matched) == ["linear", "CP, 2", "TR, 2", "Tucker, 2"]
    (linear,) = matched["linear"]
    assert linear["parameters"] == 17 * 100
    for name in list(matched)[1:]:
        (run,) = matched[name]
        assert 1 <= run["parameters"] / linear["parameters"] < 1.2
    capacity = results["capacity"]
    assert capacity["dense, 2"][0]["parameters"] == 2 * 17 * 100 + 2 * 16
    assert capacity["sparse, 2"][0]["parameters"] == 2 * 17 * 100 + 2 * 16
    for part in ("matched", "capacity"):
        assert (tmp_path / f"{part}.png").stat().st_size > 5_000
