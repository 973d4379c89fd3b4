"""Converts GPT-2 from transformers, in both directions, and from KerasHub.

Axes: D hidden, N positions, V vocabulary.
"""

from typing import Any

import numpy as np

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec
from keras_moe.models.preprocessing.tokenizer import byte_pair_files

MODEL_TYPES = ("gpt2",)
# Names of transformers' language model; a bare `GPT2Model` has no prefix.
_ROOT, _HEAD = "transformer.", "lm_head.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias")


def gpt2_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    root = _ROOT if f"{_ROOT}wte.weight" in file else ""
    if f"{root}h.0.attn.c_attn.weight" not in file:
        return None
    vocabulary_size, dim = _spec.required(file, f"{root}wte.weight", 2)
    max_length, _ = _spec.required(file, f"{root}wpe.weight", 2)
    sizes = {
        "vocab_size": vocabulary_size,
        "n_embd": dim,
        "n_positions": max_length,
        "n_layer": _spec.numbered(file, f"{root}h."),
    }
    _spec.agree(file, config, _spec.CONFIG_NAME, **sizes)
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(name, value) != value:
            expected = f"a GPT-2 with {name}={value} in {file.path}"
            raise unfit(expected, f"{name}={config[name]}")
    is_tied = config.get("tie_word_embeddings", True) or _HEAD not in file
    arguments = {
        **_spec.GPT2,
        "vocabulary_size": vocabulary_size,
        "max_length": max_length,
        "hidden_dim": dim,
        "num_layers": sizes["n_layer"],
        "num_heads": config.get("n_head")
        or overrides.get("num_heads")
        or _spec.usual_heads(dim, file.path),
        "mlp_dim": _spec.required(file, f"{root}h.0.mlp.c_fc.weight", 2)[1],
        "activation": _spec.activation_of(
            config.get("activation_function", "gelu_new"), file, overrides
        ),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": is_tied,
    }
    left = {name: "the causal mask" for name in file if name.endswith(_BUFFERS)}
    if is_tied:
        left[_HEAD] = "tied to the embeddings"
    rules = gpt2_rules(arguments, root)
    return _spec.ConversionSpec(
        _spec.TRANSFORMERS, "GPT-2", "DecoderBackbone", arguments, rules, {}, left
    )


def gpt2_rules(arguments: dict, root: str = _ROOT) -> dict:
    """Rules of all weights; `arguments` are those of the backbone."""
    rules = {
        "token_embedding/embeddings": _rules.Direct(f"{root}wte.weight"),
        "text_positions/embedding": _rules.Direct(f"{root}wpe.weight", axes=1),
        **_rules.norm("final_norm", f"{root}ln_f."),
    }
    if not arguments["tied_embeddings"]:
        rules["token_embedding/reverse_embeddings"] = _rules.Matrix(_HEAD)
    for i in range(arguments["num_layers"]):
        block, path = f"{root}h.{i}.", f"block_{i}"
        rules |= _rules.norm(f"{path}/mixer_norm", f"{block}ln_1.")
        rules |= _rules.norm(f"{path}/feed_forward_norm", f"{block}ln_2.")
        layers = {
            "attention/attention_output": ("attn.c_proj.", {"inputs": 2}),
            "mlp/hidden": ("mlp.c_fc.", {}),
            "mlp/output": ("mlp.c_proj.", {}),
        }
        for part, name in enumerate(("query", "key", "value")):
            layers[f"attention/{name}"] = ("attn.c_attn.", {"part": part, "parts": 3})
        for layer, (name, parts) in layers.items():
            kernel = _rules.TransposedMatrix(f"{block}{name}weight", **parts)
            parts = {k: x for k, x in parts.items() if k != "inputs"}
            rules[f"{path}/{layer}/kernel"] = kernel
            rules[f"{path}/{layer}/bias"] = _rules.Vector(f"{block}{name}bias", **parts)
    return rules


# Export


def gpt2_files(model: Any) -> tuple[dict[str, np.ndarray], dict]:
    tower = model.towers["text"]
    config, kind = tower.config, "GPT-2 of transformers"
    heads = config["num_heads"]
    if config["num_key_value_heads"] is None:
        heads = None
    wanted = {
        **_spec.GPT2,
        "num_key_value_heads": heads,
        "layer_scale_initial_value": None,
    }
    tower.check(kind, **wanted)
    # As transformers names them in GPT-2's configs.
    names = {own: name for name, own in _spec.ACTIVATIONS.items()}
    end = getattr(model.tokenizer, "end_id", None)
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPES[0],
        "activation_function": names[config["activation"]],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
        "n_embd": config["hidden_dim"],
        "n_head": config["num_heads"],
        "n_inner": config["mlp_dim"],
        "n_layer": config["num_layers"],
        "n_positions": config["max_length"],
        "tie_word_embeddings": config["tied_embeddings"],
        "vocab_size": config["vocabulary_size"],
        # In the released model 50256, beyond other vocabularies.
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    files = {
        _spec.CONFIG_NAME: content,
        **byte_pair_files(model.tokenizer, is_clip=False),
    }
    return _rules.tensors_of(gpt2_rules(config), tower.values, kind), files
