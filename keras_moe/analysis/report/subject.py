"""The model that is reported on, with a description of each of its routing records.

Axes: E experts, K selected experts.
"""

from typing import Any

from keras_moe.analysis.report.inputs import plain_text, shortened
from keras_moe.analysis.report.section import PRUNED, Block, Subject
from keras_moe.analysis.usage import masks_padding

IMAGE, TEXT = "image", "text"


def make_subject(
    model: Any, name: str | None = None, class_names: Any = None
) -> Subject:
    """The subject of a report on a model."""
    if not getattr(model, "routing", None):
        raise ValueError(
            "Expected a model with experts, whose `routing` has their records; "
            f"received: {type(model).__name__} without"
        )
    backbone = getattr(model, "backbone", model)
    takes_text, takes_images = _modalities(model)
    default = IMAGE if takes_images else TEXT
    blocks = {key: _block(model, backbone, key, default) for key in model.routing}
    if class_names is None:
        preprocessor = getattr(model, "preprocessor", None)
        class_names = getattr(preprocessor, "class_names", None)
    return Subject(
        model,
        _shown(model.name if name is None else name),
        blocks,
        _grid(backbone) if takes_images else None,
        None if class_names is None else tuple(map(_shown, class_names)),
        tuple(
            x for x, is_taken in ((IMAGE, takes_images), (TEXT, takes_text)) if is_taken
        ),
    )


def _shown(name):
    """A name as pages, pictures and files can hold it."""
    return shortened(plain_text(name if isinstance(name, bytes) else str(name)))


def _modalities(model):
    """Whether a model takes texts, and whether it takes images."""
    if not isinstance(model.input, dict):
        return False, True
    return "token_ids" in model.input, "images" in model.input


def _grid(backbone):
    """The grid of patches, where the model knows it."""
    try:
        return tuple(backbone.grid)
    except (AttributeError, ValueError):
        return None


def _block(model, backbone, key, default):
    modality, slash, _ = key.partition("/")
    if not slash or modality not in (IMAGE, TEXT):
        modality = default
    record = model.routing[key]
    num_experts = int(record.dispatched.shape[-1])
    block = Block(key, key, modality, "mumoe", ("ffn",) * num_experts, None, None, None)
    if key == "head" or key.endswith("/token_mixer"):
        return block
    layer = getattr(backbone.get_layer(key), "feed_forward", None)
    router = getattr(layer, "router", None)
    # The router of a muMoE gives coefficients, and can do without an expert.
    if router is None or hasattr(layer, "ablated"):
        return block
    side = getattr(router, "side", None)
    invariant = router.groups_per_example(False)
    return block._replace(
        block=_name_of(backbone, key, layer, model.routing),
        kind={"token": "token_choice", "expert": "expert_choice"}.get(side, "soft"),
        expert_types=_expert_kinds(router, num_experts),
        num_selected_experts=getattr(router, "num_selected_experts", None),
        capacity_factor=_capacity_factor(router, side),
        group_size=None if invariant else layer.group_size,
        training_capacity_factor=None
        if getattr(router, "dropless", False)
        else getattr(router, "capacity_factor", None),
        pruning=None if _kept(router) is None else router.method,
        routes_padding=modality == TEXT and not masks_padding(model, key),
    )


def _kept(router):
    """The experts that a pruned layer keeps, or None."""
    return getattr(router, "kept_experts", None)


def _expert_kinds(router, num_experts):
    """The kinds of a record's experts, which a pruned layer may have lost."""
    if (kept := _kept(router)) is not None:
        return tuple("ffn" if e in kept else PRUNED for e in range(num_experts))
    counts = router.expert_types._asdict()
    return tuple(name for name, count in counts.items() for _ in range(count))


def _name_of(backbone, key, layer, keys):
    """A layer's name, without a modality where both share it."""
    modality, slash, name = key.partition("/")
    other = f"{TEXT if modality == IMAGE else IMAGE}/{name}"
    if slash and other in keys and backbone.get_layer(other).feed_forward is layer:
        return name
    return key


def _capacity_factor(router, side):
    """The capacity factor at inference."""
    return None if side is None else router.limits(False)[0]
