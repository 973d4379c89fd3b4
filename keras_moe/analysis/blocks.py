"""The blocks of a model that analysis looks into."""

from typing import Any


def moe_block(model: Any, name: str) -> Any:
    """A block with a mixture of experts, of a backbone or a classifier, by its name."""
    backbone = getattr(model, "backbone", model)
    if name not in backbone.routing:
        raise ValueError(
            f"Expected the name of an MoE block, one of {list(backbone.routing)}; "
            f"received: {name!r}"
        )
    return backbone.get_layer(name)
