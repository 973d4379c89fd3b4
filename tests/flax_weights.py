"""Puts the weights of the reference ViT and V-MoE models into ours."""

import re

import numpy as np

# Ours on the left, within the backbone or the classifier; theirs on the right.
_NAMES = [
    (r"patch_embedding/(kernel|bias)", r"embedding/\1"),
    (r"class_token/token", "cls"),
    (r"position_embedding/embedding", "Encoder/posembed_input/pos_embedding"),
    (r"block_(\d+)/mixer_norm/(\w+)", r"Encoder/encoderblock_\1/LayerNorm_0/\2"),
    (r"block_(\d+)/feed_forward_norm/(\w+)", r"Encoder/encoderblock_\1/LayerNorm_1/\2"),
    (
        r"block_(\d+)/attention/attention_output/(\w+)",
        r"Encoder/encoderblock_\1/SelfAttention/out/\2",
    ),
    (
        r"block_(\d+)/attention/(\w+)/(\w+)",
        r"Encoder/encoderblock_\1/SelfAttention/\2/\3",
    ),
    (r"block_(\d+)/mlp/hidden/(\w+)", r"Encoder/encoderblock_\1/Mlp/Dense_0/\2"),
    (r"block_(\d+)/mlp/output/(\w+)", r"Encoder/encoderblock_\1/Mlp/Dense_1/\2"),
    (r"block_(\d+)/moe/router/slots", r"Encoder/encoderblock_\1/Moe/Router/mu"),
    (r"block_(\d+)/moe/router/scale", r"Encoder/encoderblock_\1/Moe/Router/scale"),
    (
        r"block_(\d+)/moe/router/kernel",
        r"Encoder/encoderblock_\1/Moe/Router/dense/kernel",
    ),
    (
        r"block_(\d+)/moe/experts/hidden_(\w+)",
        r"Encoder/encoderblock_\1/Moe/Mlp/Dense_0/\2",
    ),
    (
        r"block_(\d+)/moe/experts/output_(\w+)",
        r"Encoder/encoderblock_\1/Moe/Mlp/Dense_1/\2",
    ),
    (r"final_norm/(\w+)", r"Encoder/encoder_norm/\1"),
    (r"pooler/probe", "MapHead/probe"),
    (
        r"pooler/attention/attention_output/(\w+)",
        r"MapHead/MultiHeadDotProductAttention/out/\1",
    ),
    (
        r"pooler/attention/(\w+)/(\w+)",
        r"MapHead/MultiHeadDotProductAttention/\1/\2",
    ),
    (r"pooler/norm/(\w+)", r"MapHead/LayerNorm/\1"),
    (r"pooler/mlp/hidden/(\w+)", r"MapHead/Mlp/Dense_0/\1"),
    (r"pooler/mlp/output/(\w+)", r"MapHead/Mlp/Dense_1/\1"),
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
