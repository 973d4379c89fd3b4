"""`keras-moe tokenize`, and a run on what it made."""

import json

from tests.training.text_folder import TINY, write_texts


def test_texts_become_the_data_of_a_run(done, mistake, tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "tokens"
    source = f"tokens:{folder}"
    asked = ("tokenize", texts, folder, "--splits", "train", "test", "--workers", 1)
    trained = (*asked, "--tokenizer", "trained")
    assert "vocabulary_size" in mistake(*trained)
    output = done(*trained, "--vocabulary-size", 530, "--json")
    values = json.loads(output)
    assert values["source"] == source
    assert values["splits"]["train"]["documents"] == 12
    assert values["splits"]["test"]["shards"] == 1
    # Again, by the tokenizer that it has.
    output = done(*asked, "--tokenizer", folder / "tokenizer")
    assert "tokens of 12 documents" in output
    assert source in output
    command = ("train", "moepp_lm_python", "--data", source)
    options = [f"{x}={y}" for x, y in TINY.items() if not x.startswith("max")]
    options += ["--recipe-set", "schedule.epochs=1", "data.batch_size=1"]
    options += ["schedule.warmup_steps=0"]
    run = ("--output", tmp_path / "run", "--set", *options, "data.test_split=test")
    done(*command, *run)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["metric"] == "val_perplexity"
    assert 1 < results["score"] < 560
    assert done("evaluate", tmp_path / "run", "--data", texts)
    # Tokens are no texts, and no other words may stand for them.
    assert "tokens are read by" in mistake("evaluate", tmp_path / "run")
    (folder / "index.json").unlink()
    other = (*command, "--output", tmp_path / "other")
    assert "Expected a folder of keras-moe tokenize" in mistake(*other)
    assert "which has other files" in mistake(
        *asked, "--tokenizer", folder / "tokenizer"
    )
