"""Which experts of each block are left, as a `MoEConfig` keeps it."""

from typing import Any

from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_integer,
    check_one_of,
)
from keras_moe.routers.pruned import METHODS

_FIELDS = ("method", "kept_experts", "removed")


def plain_pruning(pruning: Any) -> dict | None:
    """The field `pruning` of a `MoEConfig` as plain data."""
    if pruning is None:
        return None
    if not isinstance(pruning, dict) or not isinstance(
        pruning.get("kept_experts"), dict
    ):
        raise ValueError(
            "Expected pruning to be None, or a dict with kept_experts, a dict from "
            f"blocks to experts; received: pruning={pruning!r}"
        )
    check_argument_names(pruning, list(_FIELDS), "pruning")
    kept = {
        name: [check_integer("kept_experts", expert, 0) for expert in experts]
        for name, experts in pruning["kept_experts"].items()
    }
    return {
        "method": check_one_of("method", pruning.get("method", METHODS[0]), METHODS),
        "kept_experts": kept,
        "removed": check_bool("removed", pruning.get("removed", True)),
    }


def check_pruned_blocks(pruning: dict | None, indices: tuple[int, ...]) -> None:
    """Checks that all pruned blocks are mixtures of experts."""
    names = [f"block_{index}" for index in indices]
    for name in (pruning or {"kept_experts": ()})["kept_experts"]:
        if name not in names:
            raise ValueError(
                f"Expected the names of MoE blocks, among {names}; "
                f"received: pruning of {name!r}"
            )


def kept_experts_of(pruning: dict | None, index: int) -> list[int] | None:
    """The experts that a block keeps, or None for all."""
    return None if pruning is None else pruning["kept_experts"].get(f"block_{index}")
