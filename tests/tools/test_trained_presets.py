"""The files of trained presets: smaller than `save_to_preset`'s, and the same model."""

import runpy

import numpy as np
import pytest

from keras_moe import models
from tests.forks import ROOT
from tests.small_models import assert_same_outputs


@pytest.mark.parametrize(("largest", "tolerance"), [(2_000_000, 0), (1000, 0.02)])
def test_weights_are_written_in_less_room(tmp_path, largest, tolerance):
    tool = runpy.run_path(str(ROOT / "tools" / "make_trained_presets.py"))
    tool["save"].__globals__["LARGEST"] = largest
    model = models.from_preset("mumoe_digits")
    model.save_to_preset(tmp_path / "plain")
    tool["save"](model, tmp_path / "small", models.ModelCard())
    plain, small = (
        sum(file.stat().st_size for file in (tmp_path / name).glob("*.h5"))
        for name in ("plain", "small")
    )
    assert small < (0.75 if tolerance == 0 else 0.45) * plain
    images = np.random.default_rng(0).uniform(-1, 1, (4, 16, 16, 1))
    again = models.from_preset(str(tmp_path / "small"))
    assert_same_outputs(again, model, images, rtol=0, atol=tolerance)
    assert {weight.dtype for weight in again.weights} == {"float32"}
    # Saving again replaces it, checksums included.
    tool["save"](again, tmp_path / "small", models.ModelCard(data="digits"))
    models.from_preset(str(tmp_path / "small"))
