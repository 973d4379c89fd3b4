"""`keras-moe report`: of images and of pairs, and of what a run was tested on."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import models
from tests.small_models import small_pairs_model, with_weights

pytest.importorskip("tensorflow")

CAPTIONS = ("a red one", "a dark one", "[bold]<b>nothing</b>")


def test_images_of_a_run(done, tmp_path):
    keras.utils.set_random_seed(1)
    model = models.from_preset(
        "vmoe_digits", num_classes=10, load_weights=False, moe_layers=[1],
        num_experts=2, num_heads=2, patch_size=8, hidden_dim=16, num_layers=2,
        mlp_dim=16,
    )  # fmt: skip
    run = tmp_path / "run"
    with_weights(model).save_to_preset(run / "preset")
    recipe = {"data": {"source": "digits"}, "objective": {}}
    (run / "results.json").write_text(json.dumps({"recipe": recipe}))
    output = tmp_path / "out"
    arguments = ("report", run, "--examples", 20, "--output", output)
    printed = done(*arguments, "--json")
    values = json.loads(printed)
    facts = [values[name] for name in ("examples", "data", "split")]
    assert facts == [20, "digits", "test"]
    assert Path(values["page"]) == output / "report.html"
    data = json.loads((output / "report.json").read_text())
    # Four patches and a class token.
    assert data["sections"]["loads"]["block_1"]["tokens"] == 100
    assert "by_class" in data["sections"]["loads"]["block_1"]
    printed = done(*arguments, "--show-examples", 3, 17)
    shown = json.loads((output / "report.json").read_text())["sections"]["explorer"]
    assert [example["number"] for example in shown["examples"]] == [3, 17]
    assert values["findings"][0]["level"] in printed
    assert "report.html" in printed.replace("\n", "")


def test_pairs_of_a_folder(done, tmp_path):
    folder = tmp_path / "preset"
    small_pairs_model(CAPTIONS).save_to_preset(folder)
    photos = tmp_path / "photos"
    (photos / "test").mkdir(parents=True)
    lines = ["image,caption"]
    for number, caption in enumerate(CAPTIONS):
        pixels = np.full((16, 16, 1), 60 * number, "uint8")
        keras.utils.save_img(photos / "test" / f"{number}.png", pixels, scale=False)
        lines.append(f"{number}.png,{caption}")
    (photos / "test" / "captions.csv").write_text("\n".join(lines))
    output = tmp_path / "out"
    printed = done(
        "report", folder, "--data", f"folder:{photos}", "--output", output, "--json"
    )
    assert json.loads(printed)["examples"] == 3
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "<b>nothing</b>" not in page
    assert "<code>keras-moe report " in page
    recalls = re.search(
        r"R@1 image to text, text to image</span> ([\d.]+)%, ([\d.]+)%", page
    )
    assert {*map(float, recalls.groups())} <= {0, 33.3, 66.7, 100}
    sections = json.loads((output / "report.json").read_text())["sections"]
    assert sections["loads"]["image/block_1"]["tokens"] == 12
