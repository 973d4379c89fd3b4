"""Language models become mixtures, ours and KerasHub's: function, training, input."""

from pathlib import Path

import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_moe import models, training
from keras_moe.models.conversion._spec import GPT2
from tests.compare import assert_close, assert_same
from tests.keras_hub_language_models import (
    IDS,
    MERGES,
    PROMPTS,
    TEXTS,
    language_model,
    vocabulary,
)
from tests.pair_models import TEXT
from tests.refusals import refuses
from tests.small_models import with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

ROOT = Path(__file__).resolve().parents[2]


def greedy(model):
    return model.generate(PROMPTS, stop_token_ids=None)["token_ids"]


def gpt2(**kwargs):
    sizes = {**TEXT, "max_length": 12, "mlp_dim": 12, "seed": 0}
    own = {**GPT2, "tied_embeddings": True, "activation": "gelu_tanh", **kwargs}
    backbone = models.DecoderBackbone(**sizes, **own)
    model = models.CausalLM(with_weights(backbone))
    model.compile(sampler="greedy")
    return model


# Ours


@pytest.mark.parametrize(
    "kwargs", [{}, {"gated_mlp": True, "use_bias": False, "activation": "silu"}]
)
def test_our_language_model(kwargs):
    dense = gpt2(**kwargs)
    sparse, report = training.upcycle(dense, num_experts=4, num_selected_experts=2)
    assert report.blocks == ("block_1",)
    assert report.preserved
    assert report.largest_difference < 1e-5
    assert_close(sparse(TEXTS), dense(TEXTS), 1e-4, 1e-5)
    assert_same(greedy(sparse), greedy(dense))
    assert sparse.fit(IDS, verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize("options", [{"preset": "moepp"}, {"router": "mumoe"}])
def test_gpt2_to_moe_plus_plus_and_mumoe(options):
    dense = gpt2()
    sparse, report = training.upcycle(
        dense, num_experts=4, moe_layers="every_1", **options
    )
    change = np.abs(ops.convert_to_numpy(sparse(TEXTS) - dense(TEXTS))).max()
    assert not report.preserved
    assert 0 < change < 10
    assert 0 < report.largest_difference < 10
    assert greedy(sparse).shape == IDS.shape
    assert sparse.fit(IDS, verbose=0).history["loss"][0] > 0
    router = sparse.backbone.get_layer("block_1").feed_forward.router
    assert router.gating_residual == ("preset" in options)


def test_the_report_names_how_far_logits_moved():
    """With noise the function changes, by as much as the models differ."""
    dense = gpt2()
    ids = {"token_ids": IDS, "padding_mask": np.arange(8) < np.array([[8], [6], [3]])}
    sparse, report = training.upcycle(dense, noise=0.1, num_experts=4, images=ids)
    change = np.abs(ops.convert_to_numpy(sparse(ids) - dense(ids)))
    assert_close(report.largest_difference, change[ids["padding_mask"]].max(), 1e-4)
    assert not report.preserved


# KerasHub's

KINDS = {
    "GPT2": {},
    "Llama": {"rope_position_scaling_factor": 2.0},
    "Llama3": {"rope_max_wavelength": 500.0},
    "Mistral": {"sliding_window": 8, "rope_scaling_factor": 2.0},
    "Qwen3": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", KINDS)
def test_language_models_of_keras_hub(name, tmp_path):
    dense = language_model(name, **KINDS[name])
    ours, report = models.convert(dense)
    # KerasHub's norms of queries and keys have another epsilon.
    tolerance = 1e-3 if name == "Qwen3" else 1e-5
    assert bool(report.notes) == (name == "Qwen3")
    mask = np.arange(8) < np.array([[8], [6], [3]])
    for padding in (np.ones_like(mask), mask):
        x = {**TEXTS, "padding_mask": padding}
        expected, actual = (ops.convert_to_numpy(m(x)) for m in (dense, ours))
        assert_close(actual[padding], expected[padding], 1e-4, tolerance)
    ours.compile(sampler="greedy")
    assert_same(greedy(ours), greedy(dense))
    sparse, report = training.upcycle(dense, num_experts=4, num_selected_experts=2)
    assert type(sparse) is models.CausalLM
    assert report.blocks == ("block_1",)
    assert report.preserved
    assert report.largest_difference < 1e-5
    assert report.dense_parameters == dense.count_params()
    assert report.dense_parameters < report.active_parameters < report.parameters
    sparse.save_to_preset(tmp_path / "x")
    again = models.from_preset(str(tmp_path / "x"))
    assert_same(again(TEXTS), sparse(TEXTS))


def test_tokenizers_and_presets_of_keras_hub(tmp_path):
    names = {**vocabulary(), "<|im_end|>": 266}
    dense = language_model("Qwen3", vocabulary_size=267)
    dense.preprocessor = keras_hub.models.Qwen3CausalLMPreprocessor(
        keras_hub.tokenizers.Qwen3Tokenizer(names, MERGES), sequence_length=12
    )
    dense.save_to_preset(tmp_path / "hub")
    ours = models.from_preset(str(tmp_path / "hub"))
    assert ours.backbone.get_config()["max_length"] == 12
    ours.compile(sampler="greedy")
    assert ours.generate("hello", 9) == dense.generate("hello", max_length=9)


# Bad input


def test_bad_input():
    def check(message, model, **kwargs):
        refuses(message, training.upcycle, model, **kwargs)

    llama = language_model("Llama")
    check("received: MixtralCausalLM", language_model("Mixtral"))
    check("'LlamaBackbone', .*received: GemmaCausalLM", language_model("Gemma"))
    wide = language_model("Qwen3", head_dim=6)
    check(r"Qwen3 with head_dim=4 .*received: head_dim=6", wide)
    frequencies = {"frequency_adjustment_factor": 8.0, "low_freq_factor": 1.0}
    frequencies |= {"high_freq_factor": 4.0, "pretraining_sequence_length": 8}
    frequencies = {f"rope_{name}": value for name, value in frequencies.items()}
    newer = language_model("Llama3", **frequencies)
    check("whose rotary positions have one scale.*=8.0", newer)
    check("without gates for router='mumoe'", llama, router="mumoe")
    check("Expected a token choice router, .*look ahead", llama, router="soft")
    check("Expected towers=None for DecoderBackbone", llama, towers=("text",))
    sparse, _ = training.upcycle(gpt2(), num_experts=2)
    check(r"Expected a dense model; .*\['block_1'\]", sparse)


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_of_another_vocabulary(tmp_path):
    """A tied matrix is both embeddings and head, of one vocabulary."""
    sparse, _ = training.upcycle(gpt2(), num_experts=2)
    sparse.save_weights(tmp_path / "x.weights.h5")
    backbone = sparse.backbone.get_config()
    other = models.CausalLM(
        models.DecoderBackbone.from_config({**backbone, "vocabulary_size": 24})
    )
    with pytest.raises(ValueError, match="vocabulary_size=24, tied=True"):
        other.load_weights(tmp_path / "x.weights.h5")
