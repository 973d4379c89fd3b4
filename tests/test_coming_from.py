"""The snippets for those who come from another library run, on small models."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_moe
from tests.forks import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
BLOCKS = re.findall(
    r"## (\S+)\n(?:(?!\n## ).)*?```python\n# keras_moe\n(.*?)```", PAGE, re.S
)
TINY = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
IMAGE = {"image_shape": (32, 32, 3), "patch_size": 16}
TEXT = {"vocabulary_size": 520, "max_length": 12}


def small(preset, **overrides):
    """A preset of the page with the sizes of a test."""
    if Path(preset).is_dir():
        return from_preset(preset)
    if overrides.get("task") == "contrastive":
        return from_preset(preset, image=IMAGE, text=TEXT, **TINY, **overrides)
    if preset.startswith("vmoe"):
        overrides = {"num_experts": 2, "moe_layers": "every_2"} | overrides
    return from_preset(preset, **IMAGE, **TINY, **overrides)


from_preset = keras_moe.models.from_preset


@pytest.mark.parametrize(("library", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_snippet_runs(library, block, tmp_path, monkeypatch):
    monkeypatch.setattr(keras_moe.models, "from_preset", small)
    names = {
        "keras": keras,
        "keras_moe": keras_moe,
        "images": np.zeros((4, 32, 32, 3), "float32"),
        "labels": np.arange(4),
        "captions": ["a dot", "two dots", "a line", "two lines"],
        "folder": tmp_path / "preset",
    }
    exec(block, names)
    if library == "google-research/vmoe":
        moe = names["model"].backbone.moe
        assert (moe.examples_per_group, moe.num_experts) == (8, 8)
        assert moe.router_arguments["noise_std"] == 1.0
    if library == "OpenCLIP":
        assert names["image_features"].shape == names["text_features"].shape


def test_every_library_has_a_snippet():
    assert [name for name, _ in BLOCKS] == re.findall(r"^## (\S+)", PAGE, re.M)
