"""The text towers of KerasHub's CLIP and SigLIP."""

import keras_hub

from keras_moe.models.conversion.keras_hub_parts import (
    Names,
    activation_of,
    block_rules,
    resolved,
)
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.weight_rules import Direct, Squeezed, direct, norm

_hub = keras_hub.models
_POSITIONS = "embedding/position_embedding/embeddings"


def text_tower_plan(encoder, clip, names: Names) -> ConversionPlan:
    """The plan for a text tower of CLIP or SigLIP."""
    is_clip = isinstance(encoder, _hub.CLIPTextEncoder)
    last = "layer_norm/" if is_clip else "post_layer_norm/"
    rules = {
        "token_embedding/embeddings": Direct("embedding/token_embedding/embeddings"),
        "text_positions/embedding": Squeezed(_POSITIONS),
        **norm("final_norm", last, "gamma", "beta"),
    }
    kind = ("layer_norm_1", "layer_norm_2", "attention", "dense_1", "dense_2")
    if not is_clip:
        kind = ("layer_norm1", "layer_norm2", "self_attn", "mlp/fc1", "mlp/fc2")
    for i in range(encoder.num_layers):
        places = [f"encoder_block_{i}/{name}/" for name in kind]
        rules.update(block_rules(f"block_{i}", *places))
    arguments = {
        "vocabulary_size": encoder.vocabulary_size,
        "max_length": encoder.max_sequence_length,
        "hidden_dim": encoder.hidden_dim,
        "num_layers": encoder.num_layers,
        "num_heads": encoder.num_heads,
        "mlp_dim": encoder.intermediate_dim,
        "activation": activation_of(encoder.intermediate_activation),
        "layer_norm_epsilon": 1e-5 if is_clip else encoder.layer_norm_epsilon,
    }
    notes = ()
    if is_clip:
        notes = ("the last norm has epsilon 1e-5, as in CLIP, and KerasHub's has 1e-6",)
        if clip is not None:
            arguments["projection_dim"] = clip.projection_dim
            rules["projection/kernel"] = Direct("text_projection/kernel")
    else:
        arguments.update(causal=False, pooling="last", mask_padding=False)
        arguments.update(projection_dim=encoder.projection_dim, projection_bias=True)
        rules.update(direct("projection", "head/"))
    left = {}
    if "embedding/position_ids" in names:
        left[names["embedding/position_ids"]] = "the numbers 0, 1, 2, ..."
    return ConversionPlan(
        f"{'CLIP' if is_clip else 'SigLIP'} (KerasHub)",
        "TextBackbone",
        arguments,
        resolved(rules, names),
        ignored=left,
        notes=notes,
    )
