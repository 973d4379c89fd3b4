"""Small language models of KerasHub with weights that all say something."""

from typing import Any

import keras_hub
import numpy as np

SIZES = {
    "vocabulary_size": 20,
    "num_layers": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
}
GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1}
HEADS = {"num_heads": 2, "max_sequence_length": 12}
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_intermediate_dim": 6}
MODELS = {
    "GPT2": {**HEADS, "dropout": 0.0},
    "OPT": {**HEADS, "dropout": 0.0},
    "GPTNeoX": {**HEADS, "dropout": 0.0, "rotary_percentage": 0.5},
    "Llama": GROUPED,
    "Llama3": GROUPED,
    "Mistral": GROUPED,
    "Qwen": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 4},
    "Phi3": GROUPED,
    "Gemma": {**GROUPED, "head_dim": 4},
    "Gemma3": {**GROUPED, "head_dim": 4, "image_size": None, "use_post_ffw_norm": True},
    "Mixtral": {**GROUPED, "num_experts": 4, "top_k": 2},
    "QwenMoe": {
        **GROUPED,
        **EXPERTS,
        "shared_expert_intermediate_dim": 10,
        "norm_top_k_prob": False,
    },
    "Qwen3Moe": {**GROUPED, **EXPERTS, "head_dim": 4, "norm_top_k_prob": True},
}
IDS = np.random.default_rng(5).integers(1, 20, (3, 8)).astype("int32")
TEXTS = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
# The first five tokens of each row are a prompt.
PROMPTS = {**TEXTS, "padding_mask": np.repeat(np.arange(8)[None] < 5, 3, 0)}


def language_model(name: str, seed: int = 1, **changes: Any) -> Any:
    """A `...CausalLM` of KerasHub without a preprocessor, with a greedy sampler."""
    kind = getattr(keras_hub.models, f"{name}Backbone")
    backbone = kind(**{**SIZES, **MODELS[name], **changes})
    generator = np.random.default_rng(seed)
    for weight in backbone.weights:
        if "seed_generator" not in weight.path:
            weight.assign(generator.normal(size=weight.shape) * 0.3)
    kind = getattr(keras_hub.models, f"{name}CausalLM")
    model = kind(backbone=backbone, preprocessor=None)
    model.compile(optimizer="sgd", sampler="greedy")
    return model
