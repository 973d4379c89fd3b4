"""`keras-moe train`, `evaluate` and `report` on texts."""

import json

import pytest

from keras_moe import models
from tests.training.text_folder import TINY, write_texts


def test_a_model_of_texts_is_trained_measured_and_reported_on(done, tmp_path):
    source, run = write_texts(tmp_path / "texts"), tmp_path / "run"
    # The preset's tokenizer has its vocabulary and length; the recipe trains another.
    own = ("vocabulary_size", "max_length")
    sizes = [f"{name}={value}" for name, value in TINY.items() if name not in own]
    output = done(
        "train", "moepp_lm_python", "--data", source, "--output", run, "--set", *sizes,
        "--recipe-set", "schedule.epochs=1", "schedule.warmup_steps=0",
        "data.batch_size=1", "data.test_split=test",
    )  # fmt: skip
    results = json.loads((run / "results.json").read_text())
    assert results["metric"] == "val_perplexity"
    assert {row["layer"] for row in results["router_health"]} == {"block_0", "block_1"}
    assert ".generate(" in output
    model = models.from_preset(str(run / "preset"))
    assert model.generate("the dog", max_length=8).startswith("the dog")
    card = (run / "preset" / "README.md").read_text()
    assert f"| perplexity | {results['score']:.4g} | {source}, test |" in card

    output = done("evaluate", run, "--json")
    figures = json.loads(output)
    assert figures["split"] == "test"
    assert figures["perplexity"] == pytest.approx(results["score"], rel=1e-5)

    page = tmp_path / "report"
    output = done("report", run, "--output", page, "--json")
    assert "block_1" in (page / "report.html").read_text()
