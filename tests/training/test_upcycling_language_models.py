"""Language models become mixtures, ours and KerasHub's: function, training, input."""

import re
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

import keras_moe
from keras_moe import compat, models, training
from keras_moe.models.conversion._gpt2 import GPT2
from tests.compare import assert_close, assert_same
from tests.keras_hub_language_models import (
    IDS,
    MODELS,
    PROMPTS,
    SIZES,
    TEXTS,
    language_model,
)
from tests.small_models import with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

ROOT = Path(__file__).resolve().parents[2]
DENSE = [name for name in MODELS if not name.endswith(("Moe", "Mixtral"))]
# A kind of feed-forward each; the others have the same names.
KINDS = ("GPT2", "Llama", "Gemma")


def greedy(model):
    return model.generate(PROMPTS, stop_token_ids=None)["token_ids"]


def gpt2(**kwargs):
    backbone = models.DecoderBackbone(
        vocabulary_size=20,
        max_length=12,
        hidden_dim=8,
        num_layers=2,
        num_heads=2,
        mlp_dim=12,
        seed=0,
        **{
            **GPT2,
            "tied_embeddings": True,
            "activation": "gelu_tanh",
            **kwargs,
        },
    )
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


@pytest.mark.parametrize("name", DENSE)
def test_every_known_language_model(name):
    dense = language_model(name)
    sparse, report = training.upcycle(dense, num_experts=4, num_selected_experts=2)
    assert type(sparse) is type(dense)
    assert len(report.blocks) == 1
    assert report.preserved
    assert report.largest_difference < 1e-5
    assert_close(sparse(TEXTS), dense(TEXTS), 1e-4, 1e-5)
    assert report.dense_parameters == dense.count_params()
    assert report.dense_parameters < report.active_parameters < report.parameters
    assert report.parameters == sparse.count_params()


def test_the_table_names_all_known_decoder_layers():
    made = {type(x).__name__ for name in DENSE for x in decoders(language_model(name))}
    assert made == set(compat.FEED_FORWARDS)


def decoders(model):
    return model.backbone.transformer_layers


@pytest.mark.parametrize("name", KINDS)
def test_generation_training_and_weights(name, tmp_path):
    dense = language_model(name)
    options = {"num_experts": 4, "moe_layers": "every_1", "dropless": True}
    sparse, _ = training.upcycle(dense, **options)
    assert_same(greedy(sparse), greedy(dense))
    losses, mask = [], np.arange(8) < np.array([[8], [6], [3]])
    x = {**TEXTS, "padding_mask": mask.astype("int32")}
    for model in (dense, sparse):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        fit = model.fit(x, IDS, sample_weight=mask, batch_size=3, verbose=0)
        losses.append(fit.history["loss"][0])
    # The importance loss of both blocks comes on top.
    assert losses[0] + 1e-6 < losses[1] < losses[0] + 0.1
    kernel = next(w for w in sparse.weights if w.path.endswith("hidden_kernel"))
    kernels = ops.convert_to_numpy(kernel)
    assert np.abs(kernels - kernels[:1]).max() > 1e-6
    sparse.save_weights(tmp_path / "x.weights.h5")
    other, _ = training.upcycle(language_model(name, seed=2), **options)
    other.load_weights(tmp_path / "x.weights.h5")
    assert_same(other(TEXTS), sparse(TEXTS))
    for save, path in ((sparse.save, "x.keras"), (sparse.save_to_preset, "x")):
        with pytest.raises(ValueError, match="Expected save_weights and load_weights"):
            save(tmp_path / path)


def test_moe_plus_plus_hands_logits_from_block_to_block():
    dense = language_model("Llama")
    sparse, report = training.upcycle(
        dense, num_experts=3, preset="moepp", moe_layers="every_1"
    )
    assert not report.preserved
    assert 0 < report.largest_difference < 10
    before = ops.convert_to_numpy(sparse(TEXTS))
    (kernel,) = [w for w in sparse.weights if w.path.endswith("residual_kernel")]
    kernel.assign(np.full(kernel.shape, 3.0) * np.arange(kernel.shape[1]))
    assert np.abs(ops.convert_to_numpy(sparse(TEXTS)) - before).max() > 1e-3
    # One token at a time, too.
    tokens = greedy(sparse)
    logits = ops.convert_to_numpy(sparse({**TEXTS, "token_ids": tokens}))
    assert_same(tokens[:, 5:], logits[:, 4:-1].argmax(-1))
    assert np.isfinite(sparse.fit(TEXTS, IDS, verbose=0).history["loss"][0])


def test_padding_is_not_routed_in_training():
    """Padding gets no gradient of the losses that balance experts."""
    sparse, _ = training.upcycle(
        language_model("Llama"),
        num_experts=4,
        moe_layers=[0],
        auxiliary_losses={"importance": 1.0},
        noise_std=0.0,
    )
    backbone, values = sparse.backbone, []
    mask = np.arange(8) < np.array([[8], [6], [3]])
    for filling in (1, 7):
        ids = np.where(mask, IDS, filling)
        x = {"token_ids": ids, "padding_mask": mask.astype("int32")}
        backbone(x, training=True)
        values.append(ops.convert_to_numpy(sum(backbone.losses)))
    assert_close(values[0], values[1], 1e-5)


def test_mumoe_in_place_of_keras_hub_s_gpt2():
    dense = language_model("GPT2")
    sparse, report = training.upcycle(dense, num_experts=4, router="mumoe", rank=20)
    assert report.blocks
    assert 0 < report.largest_difference < 10
    assert greedy(sparse).shape == IDS.shape


def test_frozen_layers_stay_frozen_and_the_compilation_is_kept():
    dense = language_model("Llama")
    dense.backbone.transformer_layers[1].trainable = False
    dense.compile(keras.optimizers.Adam(0.3), sampler="beam")
    sparse, _ = training.upcycle(dense, num_experts=4)
    assert float(sparse.optimizer.learning_rate) == np.float32(0.3)
    assert type(sparse.sampler) is type(dense.sampler)
    assert not any("_1/" in weight.path for weight in sparse.trainable_weights)
    assert any("_0/" in weight.path for weight in sparse.trainable_weights)


def test_the_snippet_of_the_docs_runs(monkeypatch):
    page = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"### Language models\n\n```python\n(.*?)```", page, re.S)
    for name in ("Llama", "Mixtral"):
        kind = getattr(keras_hub.models, f"{name}CausalLM")
        (preset,) = re.findall(rf'{name}CausalLM.from_preset\("(.*?)"\)', snippet)
        assert preset in kind.presets
        made = classmethod(lambda cls, _, name=name: language_model(name))
        monkeypatch.setattr(kind, "from_preset", made)
    monkeypatch.setattr(models, "from_preset", lambda _: gpt2())
    names = {"keras_hub": keras_hub, "keras_moe": keras_moe}
    mixtral = language_model("Mixtral")(TEXTS)
    exec(snippet, names)
    assert len(names["moepp"].backbone.routing) == 2
    assert names["report"].preserved
    assert_close(names["mixtral"](TEXTS), mixtral, 1e-4, 1e-5)


# Bad input


def test_bad_input():
    def check(message, model, **kwargs):
        with pytest.raises(ValueError, match=message):
            training.upcycle(model, **kwargs)

    llama = language_model("Llama")
    sparse, _ = training.upcycle(llama, num_experts=2)
    check("Expected a dense model; .*'transformer_layer_1'", sparse)
    check("one with mixtures of experts .*replace_moe", language_model("Mixtral"))
    bloom = keras_hub.models.BloomBackbone(
        **{**SIZES, "vocabulary_size": 20}, num_heads=2, dropout=0.0
    )
    check(r"\['GPTNeoXDecoder', .*received: BloomDecoder in BloomBackbone", bloom)
    check("without a gate for router='mumoe'", llama, router="mumoe")
    check("Expected a token choice router, .*look ahead", llama, router="soft")
    every = {"preset": "moepp", "gating_residual": "every_block"}
    check("gating_residual=True or False.*'every_block'", llama, **every)
    check("no carry_optimizer", llama, carry_optimizer=True)
    check("no towers", llama, towers=("text",))
    check("num_layers=2", llama, moe_layers=[5])
    check("Expected at least one block", llama, moe_layers=None)
    llama.backbone.enable_lora(2)
    check("plain weights; received: .*lora_enabled=True", llama)
    gated = gpt2(gated_mlp=True)
    check("without gates for router='mumoe'.*gated=True", gated, router="mumoe")
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
