"""The study of muMoE on a few steps: what it stores, prints and draws."""

import json

import numpy as np
import pytest

from keras_moe import data
from tests.tools.studies.small_mumoe import make_small
from tools.studies import mumoe_editing
from tools.studies.mumoe_models import Fit, numbers, with_attributes

TINY = ["--epochs", "8", "--seeds", "1", "--experts", "2", "--rank", "4"]
TINY += ["--learning-rate", "0.01"]


@pytest.fixture
def study(program, monkeypatch):
    make_small(monkeypatch)
    monkeypatch.setattr(mumoe_editing, "EXPERT_STRENGTHS", (1.0,))
    monkeypatch.setattr(mumoe_editing, "BLIND_STRENGTHS", (2.5,))
    monkeypatch.setattr(mumoe_editing, "PASSES", 1)
    return lambda *arguments: program("mumoe", *arguments)


def test_numbers_are_two_digits():
    images, labels = numbers("test", 200)
    assert images.shape == (200, 16, 32, 1)
    assert np.bincount(labels).tolist() == [2] * 100
    digits, classes = data.load_digits("test", (16, 16, 1))
    for image, label in zip(images[:20], labels[:20]):
        for half, digit in ((image[:, :16], label // 10), (image[:, 16:], label % 10)):
            known = np.abs(digits - half).max(axis=(1, 2, 3)) == 0
            assert digit in classes[known]


def test_the_bias_is_planted():
    images = np.ones((2, 4, 4, 1))
    inverted, labels = with_attributes(
        images, np.array([3, 8]), np.array([True, False])
    )
    assert inverted[:, 0, 0, 0].tolist() == [-1, 1]
    # 5 and above, even, with a loop, prime, inverted
    assert labels.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, 0, 0]]


def test_parts_are_stored_drawn_and_not_repeated(study, tmp_path, monkeypatch):
    # Parts about heads have a file of their own.
    parts = ["--parts", "specialisation", "editing", "patches"]
    arguments = [*parts, "--output", tmp_path, *TINY, "--edited-experts", "2"]
    status, text, errors = study(*arguments)
    assert status == 0, errors
    assert "Table 2" in text
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

    # A whole run is not trained again.
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Fit, "train", interrupt)
    assert study(*arguments).status == 0
    # A damaged one is.
    stored = next((tmp_path / "runs").glob("dense*.npz"))
    stored.write_bytes(stored.read_bytes()[:100])
    assert study(*arguments).status == 130


@pytest.mark.parametrize("arguments", [["--experts", "0"], ["--seeds", "0"]])
def test_bad_arguments_are_refused(mistake, tmp_path, arguments):
    errors = mistake("mumoe", *arguments, "--output", tmp_path)
    assert arguments[0] in errors
