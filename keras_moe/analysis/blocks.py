"""What analysis takes from its callers: blocks of models, weights, and images."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops


def moe_block(model: Any, name: str) -> Any:
    """A block with a mixture of experts, of a backbone or a classifier, by its name."""
    backbone = getattr(model, "backbone", model)
    # Without those of token mixers, whose records have the block's name and a slash.
    blocks = [key for key in getattr(backbone, "routing", {}) if "/" not in key]
    if name not in blocks:
        raise ValueError(
            f"Expected the name of an MoE block, one of {blocks}; "
            f"received: {name!r} of {type(model).__name__}"
        )
    return backbone.get_layer(name)


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


@contextlib.contextmanager
def restored(variables: list) -> Iterator[list[np.ndarray]]:
    """Variables may change within the context, and have their values again after it.

    Args:
        variables: a list of them.

    Yields:
        Their values.
    """
    kept = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    try:
        yield kept
    finally:
        for variable, value in zip(variables, kept):
            variable.assign(value)
