"""OpenCLIP's names of text towers."""

import re
from typing import Any

from keras_moe.models.conversion.clip_parts import (
    LOGIT_NAMES,
    OPENAI_NUMBERS,
    OPENCLIP_BLOCK,
    OPENCLIP_CONFIG,
    activation_of,
    ignored,
)
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.sizes import agree, numbered, required, usual_heads
from keras_moe.models.conversion.torch_blocks import block_rules
from keras_moe.models.conversion.weight_rules import Direct, Squeezed, linear, norm

# OpenCLIP's arguments of a text tower that do not matter here, or that follow from the
# tensors or are read below; and those of which only some values are supported. One
# token is pooled: whether it is normalised before or after is the same.
_FREE = (
    "context_length", "vocab_size", "width", "layers", "mlp_ratio", "ls_init_value",
    "heads", "hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "pad_id",
    "eos_id", "no_causal_mask", "final_ln_after_pool", "proj_bias", "output_tokens",
    "hf_model_pretrained", "hf_proj_type", "hf_pooler_type",
)  # fmt: skip
_SUPPORTED = {
    "act_kwargs": (None, {}, {"approximate": "none"}, {"approximate": "tanh"}),
    "block_type": (None, "default"),
    "hf_model_name": (None, ""),
    "pool_type": ("argmax", "eos", "first", "last"),
    "proj_type": ("linear", "none"),
    **dict.fromkeys(
        (
            "embed_cls", "qk_norm", "scaled_cosine_attn", "scale_heads",
            "scale_attn_inner", "scale_attn", "scale_fc",
        ),
        (None, False),
    ),
}  # fmt: skip


def openclip_text_root(file) -> str | None:
    """The start of the names of OpenCLIP's text tower, or None without one."""
    for root in ("text.", ""):
        if any(
            f"{root}{name}" in file
            # A text tower of transformers, which is refused by its name.
            for name in (
                "token_embedding.weight",
                "transformer.embeddings.word_embeddings.weight",
            )
        ):
            return root
    return None


def openclip_text_plan(file, config: dict, overrides: dict) -> ConversionPlan:
    """The plan for a text tower of OpenCLIP."""
    root = openclip_text_root(file)
    model = config.get("model_cfg", {})
    text = model.get("text_cfg", {})
    _check(text, model, file)
    embedding, positions = (
        f"{root}token_embedding.weight",
        f"{root}positional_embedding",
    )
    blocks_at = f"{root}transformer.resblocks."
    blocks = numbered(file, rf"{re.escape(blocks_at)}(\d+)\.")
    vocabulary_size, hidden_dim = required(file, embedding, 2)
    max_length = required(file, positions, 2)[0]
    agree(
        file,
        text,
        OPENCLIP_CONFIG,
        vocab_size=vocabulary_size,
        context_length=max_length,
        width=hidden_dim,
        layers=len(blocks),
    )
    activation, heads = None, overrides.get("num_heads")
    if model:
        activation, heads = _activation(model, text, file), text.get("heads", 8)
    # Without a config it is a tower of OpenAI's kind.
    causal = not text.get("no_causal_mask", False)
    pool = text.get("pool_type", "argmax")
    epsilon = (text.get("norm_kwargs") or {}).get("eps", 1e-5)
    arguments = {
        "vocabulary_size": vocabulary_size,
        "max_length": max_length,
        "hidden_dim": hidden_dim,
        "num_layers": len(blocks),
        "num_heads": heads or usual_heads(hidden_dim, file.path),
        "mlp_dim": required(file, f"{blocks_at}0.mlp.c_fc.weight", 2)[0],
        "causal": causal,
        "pooling": "end_of_text" if pool in ("argmax", "eos") else pool,
        "end_of_text_id": text.get("eos_id", 2) if pool == "eos" else None,
        # Behind the end of a causal text padding changes nothing; elsewhere OpenCLIP
        # has no mask.
        "mask_padding": causal and pool != "last",
        "layer_norm_epsilon": epsilon,
        "activation": activation_of(activation, file, overrides),
    }
    rules = {
        **openclip_text_rules(root, len(blocks), file),
        **_projection(file, root, arguments),
    }
    if "projection_dim" in arguments:
        agree(file, model, OPENCLIP_CONFIG, embed_dim=arguments["projection_dim"])
    notes = ()
    if not model:
        notes = (
            "assumed: causal attention and pooling at the largest id (no config says "
            "it)",
        )
    left = ignored(file, image=("visual.",), logits=LOGIT_NAMES)
    left.update(dict.fromkeys(OPENAI_NUMBERS, "a number that the shapes imply"))
    left[f"{root}attn_mask"] = "the mask of causal attention"
    return ConversionPlan(
        "CLIP (OpenCLIP)",
        "TextBackbone",
        arguments,
        rules,
        ignored=left,
        notes=notes,
    )


def openclip_text_rules(root: str, num_layers: int, file: Any = ()) -> dict:
    """Rules of a text tower without its projection."""
    rules = {
        "token_embedding/embeddings": Direct(f"{root}token_embedding.weight"),
        "text_positions/embedding": Squeezed(f"{root}positional_embedding"),
        **norm("final_norm", f"{root}ln_final."),
    }
    for i in range(num_layers):
        block = f"{root}transformer.resblocks.{i}."
        rules.update(block_rules(file, f"block_{i}", block, OPENCLIP_BLOCK))
    return rules


def _check(text, model, file):
    """Refuses towers that `TextBackbone` does not compute."""
    if "text_arch" in model:
        text = {**text, "text_arch": model["text_arch"]}
    for name, value in text.items():
        supported = name in _FREE or value in _SUPPORTED.get(name, ())
        if name == "norm_kwargs":
            supported = not value or set(value) == {"eps"}
        if not supported:
            raise ValueError(
                "Expected a text tower of OpenCLIP's own kind in the config of "
                f"{file.path}; received: text_cfg.{name}={value!r}"
            )


def _activation(model, text, file):
    approximate = (text.get("act_kwargs") or {}).get("approximate", "none")
    if not model.get("quick_gelu"):
        return "gelu" if approximate == "none" else "gelu_pytorch_tanh"
    if text.get("act_kwargs"):
        raise ValueError(
            "Expected no act_kwargs beside quick_gelu in the config of "
            f"{file.path}; received: text_cfg.act_kwargs={text['act_kwargs']!r}"
        )
    return "quick_gelu"


def _projection(file, root, arguments):
    """Rules of the projection, whose size becomes an argument."""
    name = f"{root}text_projection"
    if name in file:
        # It is stored as here: (D, embedding).
        arguments["projection_dim"] = required(file, name, 2)[1]
        return {"projection/kernel": Direct(name)}
    if f"{name}.weight" not in file:
        return {}
    arguments["projection_dim"] = required(file, f"{name}.weight", 2)[0]
    arguments["projection_bias"] = f"{name}.bias" in file
    rules = linear("projection", f"{name}.")
    if not arguments["projection_bias"]:
        del rules["projection/bias"]
    return rules
