"""How routers tell modalities apart: pools of experts, and who is served first.

Axes: G groups, S group_size, E experts, M modalities.
"""

from collections.abc import Iterable
from typing import Any

from keras import ops

from keras_moe.checks import check_disjoint, check_integer, check_one_of
from keras_moe.ops.token_choice import PRIORITIES

# The orders that have names: those of `token_choice`, and one drawn at random.
NAMED_PRIORITIES = (*PRIORITIES, "shuffled")


def check_pools(
    expert_pools: Any, num_modalities: int | None, num_experts: int
) -> list[list[int]] | None:
    """The experts of each modality as sorted lists."""
    if expert_pools is None:
        return None
    if not _is_sequence(expert_pools) or not all(map(_is_sequence, expert_pools)):
        raise ValueError(
            "Expected expert_pools to be a sequence of experts for each modality; "
            f"received: expert_pools={expert_pools!r}"
        )
    pools = [
        sorted({check_integer("expert_pools", expert, minimum=0) for expert in pool})
        for pool in expert_pools
    ]
    if num_modalities is not None and len(pools) != num_modalities:
        raise ValueError(
            f"Expected a pool for each of num_modalities={num_modalities}; "
            f"received: expert_pools={expert_pools}"
        )
    if not pools or not all(pool and pool[-1] < num_experts for pool in pools):
        raise ValueError(
            "Expected for each modality at least one expert between 0 and num_experts "
            f"- 1 = {num_experts - 1}; received: expert_pools={expert_pools}"
        )
    check_disjoint("expert_pools", pools)
    return pools


def check_priority(priority: Any, num_modalities: int | None) -> str | list[int]:
    """The order in which tokens are served: a name, or all modalities by their ids."""
    if isinstance(priority, str) or not _is_sequence(priority):
        return check_one_of("priority", priority, NAMED_PRIORITIES)
    ids = [check_integer("priority", modality, minimum=0) for modality in priority]
    count = len(ids) if num_modalities is None else num_modalities
    if not ids or sorted(ids) != list(range(count)):
        raise ValueError(
            f"Expected priority to be one of {NAMED_PRIORITIES}, or each of the "
            f"modality ids 0 to {max(count, 1) - 1} once, in the order in which the "
            f"modalities are served; received: priority={priority}"
        )
    return ids


def known_tokens(modality_ids: Any, count: int, owner: str) -> Any:
    """The tokens of modalities that a router knows.

    A graph cannot raise for an unknown modality: its tokens are not routed.
    """
    if modality_ids is None:
        raise ValueError(
            "Expected modality_ids of shape (groups, tokens), since the router "
            f"has {owner}; received: modality_ids=None"
        )
    modality_ids = ops.cast(modality_ids, "int32")
    return ops.logical_and(modality_ids >= 0, modality_ids < count)


def both(mask: Any, known: Any) -> Any:
    """The tokens (G, S) that two masks have; None has all."""
    if mask is None or known is None:
        return known if mask is None else mask
    return ops.logical_and(mask, known)


def allowed_experts(
    modality_ids: Any, known: Any, expert_pools: list[list[int]], num_experts: int
) -> Any:
    """The experts that each token may go to."""
    allowed = ops.expand_dims(ops.logical_not(known), -1)
    for modality, pool in enumerate(expert_pools):
        in_pool = [expert in pool for expert in range(num_experts)]
        is_own = ops.expand_dims(ops.equal(modality_ids, modality), -1)
        own = ops.logical_and(is_own, ops.convert_to_tensor(in_pool, "bool"))
        allowed = ops.logical_or(allowed, own)
    return allowed


def ranks(modality_ids: Any, priority: Iterable[int]) -> Any:
    """The place of each token's modality among those that are served."""
    modality_ids = ops.cast(modality_ids, "int32")
    places = ops.zeros_like(modality_ids)
    for place, modality in enumerate(priority):
        places = ops.where(modality_ids == modality, place, places)
    return places


def _is_sequence(value):
    return not isinstance(value, (str, dict)) and hasattr(value, "__iter__")
