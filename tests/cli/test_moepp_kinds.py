"""The study's parts about kinds of experts, on a few steps."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE = ["--epochs", "1", "--seeds", "1", "--batch-size", "64", "--constants", "1"]

pytestmark = pytest.mark.backend_free


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(ROOT / "tools" / "moepp_study.py"))


def test_kinds_are_removed_counted_and_drawn(study, tmp_path, capsys):
    arguments = ["--parts", "removal", "tokens", "constants", "--output", str(tmp_path)]
    assert study["main"]([*arguments, *ONE]) == 0
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
    text = capsys.readouterr().out
    assert "Table C" in text
    assert "Figure A" in text
    # What is whole is not trained again; what is damaged is.
    study["main"].__globals__["Training"].fit = None
    assert study["main"]([*arguments, *ONE]) == 0
    (stored,) = (tmp_path / "runs").glob("kinds*.npz")
    stored.write_bytes(stored.read_bytes()[:100])
    with pytest.raises(TypeError):
        study["main"]([*arguments, *ONE])


def test_plain_patches_have_equal_pixels(study):
    images = np.zeros((1, 4, 4, 1))
    images[0, 2:, 2:] = [[[-1.0], [1.0]], [[1.0], [-1.0]]]
    deviation = study["moepp_kinds"].deviation_of_patches(images, (2, 2))
    assert deviation.tolist() == [[[0.0, 0.0], [0.0, 1.0]]]


def test_counts_of_constant_experts_are_checked(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study["main"](["--constants", "-1", "--output", str(tmp_path)])
    assert "--constants" in capsys.readouterr().err
