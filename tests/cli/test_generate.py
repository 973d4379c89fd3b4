import json

import pytest

from keras_moe import models
from tests.small_models import small_tokenizer


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "preset"
    tokenizer = small_tokenizer(max_length=12)
    backbone = models.DecoderBackbone(
        vocabulary_size=530, max_length=12, hidden_dim=8, num_layers=1, num_heads=2,
        mlp_dim=16, seed=0,
    )  # fmt: skip
    models.CausalLM(backbone, tokenizer).save_to_preset(folder)
    return folder


def test_texts_go_on_as_they_begin(preset, done):
    prompts = ["A photo  of a Cat", "the cat's hat "]
    printed = done("generate", preset, *prompts, "--seed", 3, "--max-length", 10)
    for prompt in prompts:
        assert prompt in printed
    again = done(
        "generate", preset, *prompts, "--seed", 3, "--json", "--max-length", 10
    )
    rows = json.loads(again)
    assert "\n\n".join(row["text"] for row in rows) + "\n" == printed
    options = ("--sampler", "greedy", "--json", "--strip-prompt")
    (row,) = json.loads(done("generate", preset, prompts[0], *options))
    model = models.from_preset(str(preset))
    model.compile(sampler="greedy")
    whole = model.generate(prompts[0])
    assert whole == f"{prompts[0]} {row['text']}"
    # A list, too, and an iterator of them.
    assert model.generate(iter([prompts[0]])) == [whole]


def test_what_is_refused(preset, mistake):
    message = mistake("generate", "vmoe_digits", "x")
    assert "Expected a language model; received: preset='vmoe_digits'" in message
    message = mistake("generate", preset, "a cat", "--max-length", 13)
    assert "max_length" in message
    assert "above 0" in mistake("generate", preset, "x", "--temperature", 0)
