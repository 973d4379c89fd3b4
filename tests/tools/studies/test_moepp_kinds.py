"""The study's parts about kinds of experts, on a few steps."""

import json

import numpy as np
import pytest

from tests.tools.studies.few_digits import load_few
from tools.studies.moepp import Digits, deviation_of_patches

ONE = ["--epochs", "1", "--seeds", "1", "--batch-size", "64", "--constants", "1"]


@pytest.fixture
def study(program, monkeypatch):
    load_few(monkeypatch)
    return lambda *arguments: program("moepp", *arguments)


def test_kinds_are_removed_counted_and_drawn(study, tmp_path, monkeypatch):
    arguments = ["--parts", "removal", "tokens", "constants", "--output", tmp_path]
    status, text, errors = study(*arguments, *ONE)
    assert status == 0, errors
    results = json.loads((tmp_path / "results.json").read_text())
    # The rows of Table C.
    assert list(results["removal"]["without"]) == [
        "zero",
        "copy",
        "constant",
        "zero + copy",
        "zero + constant",
        "copy + constant",
        "zero + copy + constant",
    ]
    assert 0 < results["removal"]["whole"]["mean"] <= 1
    counts = results["tokens"]["per_patch"]
    for patch in ("plain", "with an edge"):
        # At inference every choice of the two is served.
        served = sum(counts[kind][patch]["mean"] for kind in counts)
        assert served == pytest.approx(2.0, abs=1e-4)
    assert list(results["constants"]) == ["1"]
    for name in ("kinds", "constants"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    assert "Table C" in text
    assert "Figure A" in text

    # A whole run is not trained again; a damaged one is.
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Digits, "fit", interrupt)
    assert study(*arguments, *ONE).status == 0
    (stored,) = (tmp_path / "runs").glob("kinds*.npz")
    stored.write_bytes(stored.read_bytes()[:100])
    assert study(*arguments, *ONE).status == 130


def test_plain_patches_have_equal_pixels():
    images = np.zeros((1, 4, 4, 1))
    images[0, 2:, 2:] = [[[-1.0], [1.0]], [[1.0], [-1.0]]]
    deviation = deviation_of_patches(images, (2, 2))
    assert deviation.tolist() == [[[0.0, 0.0], [0.0, 1.0]]]


def test_counts_of_constant_experts_are_checked(mistake, tmp_path):
    arguments = ("--constants", "-1", "--output", tmp_path)
    assert "--constants" in mistake("moepp", *arguments)
