"""transformers' names of CLIP's and SigLIP's text towers."""

import re

from keras_moe.models.conversion.clip_parts import (
    LOGIT_NAMES,
    TRANSFORMERS_BLOCK,
    activation_of,
    ignored,
)
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.sizes import agree, numbered, required, usual_heads
from keras_moe.models.conversion.torch_blocks import block_rules
from keras_moe.models.conversion.weight_rules import (
    Direct,
    Matrix,
    Squeezed,
    linear,
    norm,
)

_CONFIG = "config.json"
# The id of OpenAI's releases, which stands for the largest id of each text.
_LARGEST = 2
# Transformers leaves out what is its classes' default.
_CLIP = {
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP = {
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def transformers_text_root(file) -> str | None:
    """The start of the names of transformers' text tower, or None without one."""
    for root in ("text_model.", ""):
        if f"{root}embeddings.token_embedding.weight" in file:
            return root
    return None


def transformers_text_plan(file, config: dict, overrides: dict) -> ConversionPlan:
    """The plan for a text tower of transformers' CLIP or SigLIP."""
    root = transformers_text_root(file)
    embedding = f"{root}embeddings.token_embedding.weight"
    positions = f"{root}embeddings.position_embedding.weight"
    first = f"{root}encoder.layers.0.mlp.fc1.weight"
    blocks = numbered(file, rf"{re.escape(root)}encoder\.layers\.(\d+)\.")
    is_siglip = f"{root}head.weight" in file
    text = config.get("text_config")
    if text is None:
        # An image tower's entries say nothing about texts.
        text = {} if "vision_config" in config else config
    vocabulary_size, hidden_dim = required(file, embedding, 2)
    sizes = {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_dim,
        "max_position_embeddings": required(file, positions, 2)[0],
        "num_hidden_layers": len(blocks),
        "intermediate_size": required(file, first, 2)[0],
    }
    agree(file, text, _CONFIG, **sizes)
    defaults = _SIGLIP if is_siglip else _CLIP
    settings = {**defaults, **text} if config.keys() - {"preprocessor"} else {}
    heads = settings.get("num_attention_heads") or overrides.get("num_heads")
    arguments = {
        "vocabulary_size": vocabulary_size,
        "max_length": sizes["max_position_embeddings"],
        "hidden_dim": hidden_dim,
        "num_layers": len(blocks),
        "num_heads": heads or usual_heads(hidden_dim, file.path),
        "mlp_dim": sizes["intermediate_size"],
        "layer_norm_epsilon": settings.get(
            "layer_norm_eps", defaults["layer_norm_eps"]
        ),
        "activation": activation_of(settings.get("hidden_act"), file, overrides),
    }
    rules = transformers_text_rules(root, len(blocks))
    notes = ()
    if is_siglip:
        arguments.update(causal=False, pooling="last", mask_padding=False)
        arguments["projection_dim"] = required(file, f"{root}head.weight", 2)[0]
        arguments["projection_bias"] = True
        rules.update(transformers_text_projection(root, is_siglip))
    else:
        arguments["end_of_text_id"], notes = _end_of_text(
            settings, vocabulary_size, file, overrides
        )
        if "text_projection.weight" in file:
            size = required(file, "text_projection.weight", 2)[0]
            arguments["projection_dim"] = size
            rules.update(transformers_text_projection(root, is_siglip))
    left = ignored(
        file, image=("vision_model.", "visual_projection."), logits=LOGIT_NAMES
    )
    if f"{root}embeddings.position_ids" in file:
        left[f"{root}embeddings.position_ids"] = "the numbers 0, 1, 2, ..."
    return ConversionPlan(
        "SigLIP (transformers)" if is_siglip else "CLIP (transformers)",
        "TextBackbone",
        arguments,
        rules,
        ignored=left,
        notes=notes,
    )


def transformers_text_rules(root: str, num_layers: int) -> dict:
    """Rules of a text tower without its projection."""
    rules = {
        "token_embedding/embeddings": Direct(
            f"{root}embeddings.token_embedding.weight"
        ),
        "text_positions/embedding": Squeezed(
            f"{root}embeddings.position_embedding.weight"
        ),
        **norm("final_norm", f"{root}final_layer_norm."),
    }
    for i in range(num_layers):
        block = f"{root}encoder.layers.{i}."
        rules.update(block_rules((), f"block_{i}", block, TRANSFORMERS_BLOCK))
    return rules


def transformers_text_projection(root: str, is_siglip: bool) -> dict:
    """Rules of a text tower's projection."""
    if is_siglip:
        return linear("projection", f"{root}head.")
    return {"projection/kernel": Matrix("text_projection.weight")}


def _end_of_text(settings, vocabulary_size, file, overrides):
    """The id at which CLIP pools, None for the largest of each text; and notes."""
    if "end_of_text_id" in overrides:
        return overrides["end_of_text_id"], ()
    end = settings.get("eos_token_id", _LARGEST)
    if end == _LARGEST:
        if settings:
            return None, ()
        return None, ("assumed: pooling at the largest id (no config says it)",)
    if end is None or end >= vocabulary_size:
        raise ValueError(
            f"Expected eos_token_id below vocab_size={vocabulary_size} in the config "
            f"of {file.path}, or end_of_text_id=... (None for the largest id of each "
            f"text); received: eos_token_id={end}"
        )
    return end, ()
