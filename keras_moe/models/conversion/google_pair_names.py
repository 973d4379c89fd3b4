"""The names of vmoe's contrastive models: a tower of images and one of texts."""

from keras_moe.models.conversion.google_names import (
    PREFIXES,
    UNKNOWN_ROUTING,
    encoder_rules,
    head_rules,
    left_of_state,
    map_head_rules,
    vit_plan,
)
from keras_moe.models.conversion.pair_plan import pair_plan
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.sizes import required
from keras_moe.models.conversion.weight_rules import Direct

_IMAGE, _TEXT = "img/", "txt/"


def google_pair_plan(
    file, name: str, overrides: dict, tower: str | None = None
) -> ConversionPlan | None:
    """The plan for both towers or for one, or None if the names are others."""
    prefix = next((x for x in PREFIXES if f"{x}{_IMAGE}embedding/kernel" in file), None)
    if prefix is None:
        return None
    image = None
    if tower != "text":
        own = {**overrides, **(overrides.get("image") or {})}
        image = vit_plan(file, prefix + _IMAGE, name, own)
        image.ignored = {}
    text = _text_plan(file, prefix + _TEXT, overrides) if tower != "image" else None
    if tower is None:
        bias = f"{prefix}b"
        plan = pair_plan(
            file,
            image,
            text,
            log_scale=f"{prefix}s",
            bias=bias if bias in file else None,
        )
    else:
        plan = text if image is None else image
        others = {"image": _TEXT, "text": _IMAGE}[tower]
        for tensor in file:
            if tensor.startswith(prefix + others):
                plan.ignored[tensor] = f"of the {'text' if image else 'image'} tower"
        plan.ignored.update(
            dict.fromkeys((f"{prefix}s", f"{prefix}b"), "of the logits of pairs")
        )
    plan.ignored.update(left_of_state(file, prefix))
    return plan


def _text_plan(file, prefix, overrides):
    own = {**overrides, **(overrides.get("text") or {})}
    embedding, root = f"{prefix}Embed_0/embedding", f"{prefix}Encoder/"
    positions = f"{root}posembed_input/pos_embedding"
    vocabulary_size, hidden_dim = required(file, embedding, 2)
    rules, arguments = encoder_rules(file, root)
    # An argument of images alone, of which texts have no weights.
    arguments.pop("query_key_norm")
    pooler, pooling = map_head_rules(file, prefix)
    head, task = head_rules(file, prefix)
    rules.update(pooler)
    notes = ()
    if arguments.get("moe_layers"):
        notes = (UNKNOWN_ROUTING,)
    if pooling is None:
        pooling = own.get("pooling", "last")
        if "pooling" not in own:
            notes += ("assumed: pooling at the last token (the weights do not tell)",)
    rules["token_embedding/embeddings"] = Direct(embedding)
    rules["text_positions/embedding"] = Direct(positions)
    if task is not None:
        arguments.update(projection_dim=task["num_classes"], projection_bias=True)
        for path, rule in head.items():
            rules[path.replace("predictions/", "projection/")] = rule
    return ConversionPlan(
        "V-MoE (Google)" if arguments.get("moe_layers") else "ViT (Google)",
        "TextBackbone",
        {
            **arguments,
            "vocabulary_size": vocabulary_size,
            "max_length": required(file, positions, 3)[1],
            "hidden_dim": hidden_dim,
            # Every token attends to all, padding included.
            "causal": False,
            "mask_padding": False,
            "pooling": pooling,
        },
        rules,
        ignored={},
        notes=notes,
    )
