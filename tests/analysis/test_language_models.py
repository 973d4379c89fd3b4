"""Language models: usage of experts by token, removal, steering, and the report."""

import json
from itertools import chain

import keras
import numpy as np
import pytest

from keras_moe import analysis, models, report

TEXTS = ["the cat sat on the mat", "a dog ran over two hills", "one two three four"]


def language_model(preset, **overrides):
    """A model of two blocks with a trained tokenizer and random weights."""
    sizes = {"vocabulary_size": 540, "max_length": 12, "hidden_dim": 16}
    sizes |= {"num_layers": 2, "num_heads": 2, "mlp_dim": 16}
    sizes |= {"num_experts": 4, "seed": 0, **overrides}
    model = models.from_preset(preset, task="causal_lm", load_weights=False, **sizes)
    model.preprocessor = models.TextTokenizer.trained(TEXTS, 540, max_length=12)
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def moepp():
    return language_model("moepp_lm_0.6b")


def records(model, rows):
    inputs = {name: rows[name] for name in ("token_ids", "padding_mask")}
    return keras.Model(model.input, model.routing).predict(inputs, verbose=0)


@pytest.mark.every_backend
def test_experts_are_pruned(moepp):
    rows = moepp.training_inputs(TEXTS)
    usage = analysis.expert_usage(moepp, rows, verbose=0)
    types = moepp.backbone.expert_types
    kept = {
        # Two FFN experts, and all others, which have no weights to save.
        name: [*np.argsort(block.tokens[0, : types.ffn])[2:], *range(4, types.total)]
        for name, block in usage.blocks.items()
    }
    masked, pruned = (
        analysis.prune_experts(moepp, kept, removed=x) for x in (False, True)
    )
    # Three kernels of 16 x 16 in each of two blocks' two experts.
    assert moepp.count_params() - pruned.count_params() == 2 * 2 * 3 * 16 * 16
    outputs = []
    for model in (masked, pruned):
        model.compile(sampler="greedy")
        texts = model.generate(TEXTS[:2], max_length=10)
        outputs.append((texts, model.evaluate(rows, verbose=0, return_dict=True)))
    assert outputs[0][0] == outputs[1][0]
    np.testing.assert_allclose(*(x["perplexity"] for _, x in outputs), rtol=1e-5)


@pytest.mark.parametrize("preset", ["moepp_lm_0.6b", "mumoe_gpt2_cp"])
def test_tokens_are_steered_to_an_expert(preset):
    model = language_model(preset)
    # Untrained gates of muMoE are zero.
    router = model.backbone.get_layer("block_1").feed_forward.router
    for kernel in getattr(router, "kernels", None) or [router.kernel]:
        draw = np.random.default_rng(0).normal(size=kernel.shape)
        kernel.assign(draw)
    rows = model.training_inputs(TEXTS)
    is_token = rows["padding_mask"] > 0
    steered = analysis.steer_expert(model, "block_1", expert=2, strength=100.0)
    gates = records(steered, rows)["block_1"].gates[is_token]
    assert set(gates.argmax(axis=-1)) == {2}
    before = records(model, rows)["block_1"].gates[is_token]
    assert set(before.argmax(axis=-1)) != {2}
    # Texts are written with it, and pushing back undoes it.
    mask = np.ones((1, 4), int)
    prompt = {"token_ids": rows["token_ids"][:1, :4], "padding_mask": mask}
    back = analysis.steer_expert(steered, "block_1", expert=2, strength=-100.0)
    for each in (steered, back):
        each.compile(sampler="greedy")
    written = [
        x.generate(prompt, 12, stop_token_ids=None)["token_ids"]
        for x in (model, steered, back)
    ]
    np.testing.assert_array_equal(written[0], written[2])
    # Other copies of it are steered, too.
    copies = [records(x, rows)["block_1"].gates for x in (steered, steered.copy())]
    np.testing.assert_array_equal(*copies)
    scores = [x.score(TEXTS) for x in (model, steered, back)]
    np.testing.assert_allclose(scores[0], scores[2], rtol=1e-4)
    assert np.abs(scores[1] - scores[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("preset", "own"), [("moepp_lm_0.6b", "compute"), ("mumoe_gpt2_cp", "mumoe")]
)
def test_a_report_has_the_tokens_of_each_expert(preset, own, tmp_path):
    model = language_model(preset)
    rows = model.training_inputs(TEXTS)
    written = report.write_report(model, rows, tmp_path / "report", verbose=0)
    sections = json.loads(written.data.read_text())["sections"]
    assert {"loads", "top-tokens", "explorer", own} <= {*sections}
    best = chain(*(x["by_weight"] for x in sections["top-tokens"]["block_1"]))
    assert {x["word"] for x in best} & {"cat", "dog", "two"}
    page = written.page.read_text()
    assert "Top tokens of each expert" in page
    if own == "compute":
        # FFN experts by token, as in the paper's figures.
        counts = sections["compute"]["words"]
        layers = records(model, rows).values()
        mean = np.mean([x.dispatched[..., :4].sum(-1) for x in layers], axis=0)
        ids = rows["token_ids"]
        is_two = np.array(model.preprocessor.tokens(ids)) == "two"
        expected = mean[is_two & (rows["padding_mask"] > 0)].mean()
        assert counts["two"] == [2, pytest.approx(expected, abs=1e-5)]
