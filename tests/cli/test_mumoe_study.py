"""The study of muMoE on a few steps: what it stores, prints and draws."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--epochs", "8", "--seeds", "1", "--experts", "2", "--rank", "4"]
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
    tool["main"].__globals__.update(EXPERT_STRENGTHS=(1.0,), BLIND_STRENGTHS=(2.5,))
    tool["Editing"].passes = 1
    return tool


def test_numbers_are_two_digits(study):
    images, labels = study["numbers"]("test", 200)
    assert images.shape == (200, 16, 32, 1)
    assert np.bincount(labels).tolist() == [2] * 100
    digits, classes = study["data"].load_digits("test", (16, 16, 1))
    for image, label in zip(images[:20], labels[:20]):
        for half, digit in ((image[:, :16], label // 10), (image[:, 16:], label % 10)):
            known = np.abs(digits - half).max(axis=(1, 2, 3)) == 0
            assert digit in classes[known]


def test_the_bias_is_planted(study):
    images = np.ones((2, 4, 4, 1))
    inverted, labels = study["with_attributes"](
        images, np.array([3, 8]), np.array([True, False])
    )
    assert inverted[:, 0, 0, 0].tolist() == [-1, 1]
    # 5 and above, even, with a loop, prime, inverted
    assert labels.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 0, 0]]


def test_all_parts_are_stored_drawn_and_not_repeated(study, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), *TINY, "--edited-experts", "2"]
    assert study["main"](arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    (score,) = results["specialisation"]["heads"]["final 2"]["polysemanticity"]
    assert score >= 0
    (run,) = results["editing"]["runs"]
    assert set(run["rows"]) == {
        "linear",
        "muMoE",
        "+ oversampling",
        "+ adversarial",
        "+ blind thresh.",
        "+ expert edit",
        "+ expert edit, N",
    }
    assert run["strengths"]["+ expert edit"] == 2.0
    for name in ("polysemanticity", "ablation", "svd", "subpopulations"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    assert (tmp_path / "patches_block_0.png").stat().st_size > 3_000
    # What is whole is not trained again.
    study["main"].__globals__["Study"].train = None
    assert study["main"](arguments) == 0
    assert "Table 2" in capsys.readouterr().out
    # What is damaged is.
    stored = next((tmp_path / "runs").glob("dense*.npz"))
    stored.write_bytes(stored.read_bytes()[:100])
    with pytest.raises(TypeError):
        study["main"](arguments)


@pytest.mark.parametrize("arguments", [["--experts", "0"], ["--seeds", "0"]])
def test_bad_arguments_are_refused(study, tmp_path, capsys, arguments):
    with pytest.raises(SystemExit):
        study["main"]([*arguments, "--output", str(tmp_path)])
    assert arguments[0] in capsys.readouterr().err
