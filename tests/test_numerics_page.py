"""The snippets of the page about numerics run."""

import re

import keras
import numpy as np

from keras_moe import models
from tests.forks import ROOT

PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")


def test_the_snippets_run(capsys):
    images = np.random.default_rng(0).uniform(-1, 1, (4, 16, 16, 1)).astype("float32")
    names = {"keras": keras, "models": models, "np": np, "images": images}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert blocks
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out == "float32\n"
    # Equal, and not because all are zero.
    assert np.ptp(names["first"].predict(images, verbose=0)) > 0.1
