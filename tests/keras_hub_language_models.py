"""Small language models of KerasHub with weights that all say something."""

from typing import Any

import keras_hub
import numpy as np

SIZES = {
    "vocabulary_size": 20, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12,
}  # fmt: skip
GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1}
HEADS = {"num_heads": 2, "max_sequence_length": 12}
MODELS = {
    "GPT2": {**HEADS, "dropout": 0.0},
    "Llama": GROUPED,
    "Llama3": GROUPED,
    "Mistral": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 4},
    "Gemma": {**GROUPED, "head_dim": 4},
    "Mixtral": {**GROUPED, "num_experts": 4, "top_k": 2},
}
IDS = np.random.default_rng(5).integers(1, 20, (3, 8)).astype("int32")
TEXTS = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
# The first five tokens of each row are a prompt.
PROMPTS = {**TEXTS, "padding_mask": np.repeat(np.arange(8)[None] < 5, 3, 0)}


# Of a tokenizer of byte pairs.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d"]


def vocabulary():
    """256 bytes, a token for each merge, and the end of text."""
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = [chr(x) for x in bytes_] + [chr(256 + i) for i in range(256 - len(bytes_))]
    names += [merge.replace(" ", "") for merge in MERGES] + ["<|endoftext|>"]
    return {name: index for index, name in enumerate(names)}


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
