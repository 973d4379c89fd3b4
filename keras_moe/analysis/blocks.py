"""Arguments of analyses: blocks of models, and images."""

from typing import Any


def moe_block(model: Any, name: str) -> Any:
    """The block with a mixture of experts of a name, in a backbone or a classifier."""
    backbone = getattr(model, "backbone", model)
    # The records of token mixers have the block's name and a slash.
    blocks = [key for key in getattr(backbone, "routing", {}) if "/" not in key]
    if name not in blocks:
        raise ValueError(
            f"Expected the name of an MoE block, one of {blocks}; "
            f"received: {name!r} of {type(model).__name__}"
        )
    return backbone.get_layer(name)


def masks_padding(model: Any, name: str) -> bool:
    """Whether the block of a routing record routes texts without their padding."""
    backbone = getattr(model, "backbone", model)
    if not isinstance(model.input, dict) or name.startswith("image/"):
        return False
    config = backbone.get_config()
    return config.get("text", config).get("mask_padding", False)


def mumoe_head(model: Any) -> Any:
    """The muMoE head of a classifier."""
    head = getattr(model, "head", None)
    if head is None or not hasattr(model, "routing"):
        raise ValueError(
            "Expected a classifier with a muMoE head; received: "
            f"{type(model).__name__} without head"
        )
    return head


def check_images(images: Any) -> Any:
    """`images`, if they are an array (B, height, width, channels) with an image."""
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) != 4 or not shape[0]:
        raise ValueError(
            "Expected an array of at least one image (batch, height, width, "
            f"channels); received: {type(images).__name__}, shape={shape}"
        )
    return images
