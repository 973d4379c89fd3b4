"""GPT-2 of transformers and of KerasHub: logits, tokens, text, export, bad input."""

import json

import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

from keras_moe import models
from tests.compare import assert_close, assert_same
from tests.keras_hub_language_models import (
    MERGES,
    PROMPTS,
    TEXTS,
    language_model,
    vocabulary,
)
from tests.published import write_folder

pytestmark = pytest.mark.usefixtures("op_by_op")
TEXT = "hello  World\n\u00e9 world"


def tensors_of(model, root="transformer."):
    """The state dict that transformers would have of KerasHub's GPT-2."""
    weights = {w.path: np.array(w.numpy()) for w in model.backbone.weights}

    def both(source, name):
        return {f"{name}.{x}": weights.get(f"{source}/{y}") for x, y in source_of}

    source_of = (("weight", "gamma"), ("bias", "beta"))
    tensors = {
        "wte.weight": weights["token_embedding/embeddings"],
        "wpe.weight": weights["position_embedding/embeddings"],
        **both("layer_norm", "ln_f"),
    }
    for i in range(model.backbone.num_layers):
        layer, block = f"transformer_layer_{i}", f"h.{i}"
        tensors |= both(f"{layer}/self_attention_layer_norm", f"{block}.ln_1")
        tensors |= both(f"{layer}/feedforward_layer_norm", f"{block}.ln_2")
        for part in ("kernel", "bias"):
            end = {"kernel": "weight"}.get(part, part)
            fused, dense = [], f"{layer}/feedforward"
            for name in ("query", "key", "value"):
                value = weights[f"{layer}/self_attention/{name}/{part}"]
                fused.append(value.reshape(*value.shape[:-2], -1))
            output = weights[f"{layer}/self_attention/attention_output/{part}"]
            tensors |= {
                f"{block}.attn.c_attn.{end}": np.concatenate(fused, axis=-1),
                f"{block}.attn.c_proj.{end}": output.reshape(-1, output.shape[-1])
                if part == "kernel"
                else output,
                f"{block}.mlp.c_fc.{end}": weights[
                    f"{dense}_intermediate_dense/{part}"
                ],
                f"{block}.mlp.c_proj.{end}": weights[f"{dense}_output_dense/{part}"],
            }
    return {root + name: value for name, value in tensors.items()}


def folder_of(model, path, root="transformer.", extra=None, **changes):
    backbone = model.backbone
    config = {
        "model_type": "gpt2", "vocab_size": backbone.vocabulary_size,
        "n_positions": backbone.max_sequence_length, "n_embd": backbone.hidden_dim,
        "n_layer": backbone.num_layers, "n_head": backbone.num_heads,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        **changes,
    }  # fmt: skip
    return write_folder(path, {**tensors_of(model, root), **(extra or {})}, config)


def add_tokenizer(folder):
    with open(f"{folder}/vocab.json", "w") as file:
        json.dump(vocabulary(), file)
    with open(f"{folder}/merges.txt", "w", encoding="utf-8") as file:
        file.write("\n".join(["#version: 0.2", *MERGES, ""]))
    return folder


def check_same(ours, hub):
    assert_close(ours(TEXTS), hub(TEXTS), 1e-4, 1e-4)
    ours.compile(sampler="greedy")
    tokens = (x.generate(PROMPTS, stop_token_ids=None) for x in (ours, hub))
    assert_same(*(x["token_ids"] for x in tokens))


def test_transformers_files(tmp_path):
    hub = language_model("GPT2")
    folder = folder_of(hub, tmp_path / "hf")
    model = models.from_preset(folder)
    assert isinstance(model, models.CausalLM)
    assert model.preprocessor is None
    check_same(model, hub)
    # Back, bit for bit.
    models.export_weights(model, "transformers", tmp_path / "back")
    exported = load_file(str(tmp_path / "back" / "model.safetensors"))
    expected = tensors_of(hub)
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(exported[name], value)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["n_inner"] == 12
    assert config["activation_function"] == "gelu_new"
    assert config["eos_token_id"] is None


def test_names_without_a_prefix_and_with_masks(tmp_path):
    """As in the first release, which also has the causal mask and no head."""
    hub = language_model("GPT2")
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 12, 12), "float32") for i in range(2)}
    folder = folder_of(hub, tmp_path / "hf", "", masks)
    model, report = models.convert(folder)
    assert_close(model(TEXTS), hub(TEXTS), 1e-4, 1e-4)
    assert report.ignored == dict.fromkeys(masks, "the causal mask")
    assert "no tokenizer" in report.notes[0]
    # A head may be tied and written all the same, or have its own matrix.
    head = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    extra = {"lm_head.weight": head}
    tied = models.from_preset(folder_of(hub, tmp_path / "tied", extra=extra))
    assert_close(tied(TEXTS), model(TEXTS))
    untied = folder_of(hub, tmp_path / "own", extra=extra, tie_word_embeddings=False)
    untied = models.from_preset(untied)
    tokens = untied.backbone.predict(TEXTS, verbose=0)
    assert_close(untied(TEXTS), tokens @ head.T, 1e-4, 1e-4)


def test_text_in_and_out(tmp_path):
    hub = language_model("GPT2", vocabulary_size=266)
    model = models.from_preset(add_tokenizer(folder_of(hub, tmp_path / "hf")))
    tokenizer = model.preprocessor
    (ids,) = tokenizer.prompts([TEXT])
    pairs = keras_hub.tokenizers.GPT2Tokenizer(vocabulary(), MERGES)
    assert ids == list(pairs(TEXT))
    # Two spaces are two tokens, and a word takes the last one before it.
    assert [pairs.id_to_token(x) for x in ids[:3]] == ["hello", "Ġ", "Ġ"]
    assert tokenizer.texts([ids]) == [TEXT]
    assert tokenizer.documents([TEXT]) == [[*ids, 265]]
    model.compile(sampler="greedy")
    text = model.generate("hello", max_length=8)
    assert text.startswith("hello")
    assert model.score([TEXT]).shape == (1,)
    model.save_to_preset(tmp_path / "ours")
    again = models.from_preset(str(tmp_path / "ours"))
    again.compile(sampler="greedy")
    assert again.generate("hello", max_length=8) == text
    models.export_weights(model, "transformers", tmp_path / "back")
    files = [(tmp_path / x / "merges.txt").read_text("utf-8") for x in ("hf", "back")]
    assert files[0] == files[1]
    back = json.loads((tmp_path / "back" / "vocab.json").read_text("utf-8"))
    assert back == vocabulary()


def test_keras_hub_models_and_presets(tmp_path):
    hub = language_model("GPT2", vocabulary_size=266)
    pairs = keras_hub.tokenizers.GPT2Tokenizer(vocabulary(), MERGES)
    hub.preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(
        pairs, sequence_length=12
    )
    hub.save_to_preset(tmp_path / "hub")
    for source in (hub, hub.backbone, str(tmp_path / "hub")):
        model = models.from_preset(source)
        check_same(model, language_model("GPT2", vocabulary_size=266))
        assert (model.preprocessor is None) == (source is hub.backbone)
    # KerasHub's prompts begin with the end of text.
    assert model.preprocessor.start_id == 265
    assert model.generate("hello", 9) == hub.generate("hello", max_length=9)


def test_bad_input(tmp_path):
    hub = language_model("GPT2")
    folder = folder_of(hub, tmp_path / "hf")

    def check(message, source, **overrides):
        with pytest.raises(ValueError, match=message):
            models.from_preset(source, **overrides)

    # The embeddings, tied to the head, are of one vocabulary.
    check(r"\(24, 8\) for 'token_embed.*\(20, 8\)", folder, vocabulary_size=24)
    other = folder_of(hub, tmp_path / "size", vocab_size=24)
    check("vocab_size=24 .* received: 20", other)
    other = folder_of(hub, tmp_path / "scaled", scale_attn_by_inverse_layer_idx=True)
    check("scale_attn_by_inverse_layer_idx=False", other)
    add_tokenizer(folder)
    (tmp_path / "hf" / "vocab.json").write_text('{"a": 0}')
    check("GPT-2's byte pairs in .*vocab.json", folder)
    add_tokenizer(folder)
    check("vocabulary_size of at most the 20 .*received: vocabulary_size=266", folder)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 12}
    ours = models.DecoderBackbone(vocabulary_size=20, activation="gelu", **sizes)
    with pytest.raises(ValueError, match="positions='learned' for GPT-2 of transf"):
        models.export_weights(ours, "transformers", tmp_path / "llama")
    with pytest.raises(ValueError, match=r"'transformers'.*received: library='open_c"):
        models.export_weights(ours, "open_clip", tmp_path / "llama")
