"""Puts the weights of the reference ViT and V-MoE models into ours."""

import re

import numpy as np

# Ours on the left, within the backbone or the classifier; theirs on the right.
_BLOCK = [
    (r"mixer_norm/(\w+)", r"LayerNorm_0/\2"),
    (r"feed_forward_norm/(\w+)", r"LayerNorm_1/\2"),
    (r"attention/attention_output/(\w+)", r"SelfAttention/out/\2"),
    (r"attention/(\w+)/(\w+)", r"SelfAttention/\2/\3"),
    (r"mlp/hidden/(\w+)", r"Mlp/Dense_0/\2"),
    (r"mlp/output/(\w+)", r"Mlp/Dense_1/\2"),
    (r"moe/router/slots", r"Moe/Router/mu"),
    (r"moe/router/scale", r"Moe/Router/scale"),
    (r"moe/router/kernel", r"Moe/Router/dense/kernel"),
    (r"moe/experts/hidden_(\w+)", r"Moe/Mlp/Dense_0/\2"),
    (r"moe/experts/output_(\w+)", r"Moe/Mlp/Dense_1/\2"),
]
_POOLER = [
    (r"probe", "probe"),
    (r"attention/attention_output/(\w+)", r"MultiHeadDotProductAttention/out/\1"),
    (r"attention/(\w+)/(\w+)", r"MultiHeadDotProductAttention/\1/\2"),
    (r"norm/(\w+)", r"LayerNorm/\1"),
    (r"mlp/hidden/(\w+)", r"Mlp/Dense_0/\1"),
    (r"mlp/output/(\w+)", r"Mlp/Dense_1/\1"),
]
_NAMES = [
    (r"patch_embedding/(kernel|bias)", r"embedding/\1"),
    (r"class_token/token", "cls"),
    (r"position_embedding/embedding", "Encoder/posembed_input/pos_embedding"),
    *((rf"block_(\d+)/{x}", rf"Encoder/encoderblock_\1/{y}") for x, y in _BLOCK),
    (r"final_norm/(\w+)", r"Encoder/encoder_norm/\1"),
    *((f"pooler/{x}", f"MapHead/{y}") for x, y in _POOLER),
    (r"pre_logits/(\w+)", r"pre_logits/\1"),
    (r"predictions/(\w+)", r"head/\1"),
]


def flax_name(path: str) -> str:
    """The reference's name of one of our weights."""
    for mine, theirs in _NAMES:
        match = re.search(mine + "$", path)
        if match:
            name = match.expand(theirs)
            return name.replace("/gamma", "/scale").replace("/beta", "/bias")
    raise KeyError(path)


def assign_flax_weights(model, arrays: dict[str, np.ndarray]) -> None:
    """Assigns every `params/...` array, none left over in either direction."""
    left = {name for name in arrays if name.startswith("params/")}
    for weight in model.trainable_weights:
        name = f"params/{flax_name(weight.path)}"
        weight.assign(arrays[name])
        left.remove(name)
    assert not left, left
