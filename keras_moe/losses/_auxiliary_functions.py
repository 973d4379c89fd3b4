"""The table of auxiliary losses: how each reads a routing record and its router.

Axes: G groups, S group_size, E experts, K selected experts, M modalities.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_moe._checks import check_argument_names, check_integer, check_one_of
from keras_moe.losses import router_losses
from keras_moe.ops.token_choice import selected_experts

# The choices of a token that a balance loss counts.
CHOICES = ("first", "all")


class AuxiliaryFunction(NamedTuple):
    """A loss `compute(routing, router, mask, modality_ids, **options)`, (G,).

    `options` has its options and their defaults, and `reads` what else it needs of a
    router: `"selected"` (K) or `"noise"`.
    """

    compute: Callable[..., Any]
    options: dict[str, Any] = {}
    reads: tuple[str, ...] = ()


def checked_options(name: str, options: dict) -> dict:
    """All options of a loss in the table, checked."""
    defaults = FUNCTIONS[name].options
    check_argument_names(options, list(defaults), f"the auxiliary loss {name!r}")
    options = {**defaults, **options}
    if "choices" in options:
        check_one_of("choices", options["choices"], CHOICES)
    if options.get("modality") is not None:
        options["modality"] = check_integer("modality", options["modality"], 0)
    if "num_modalities" in options:
        count = check_integer("num_modalities", options["num_modalities"])
        options["num_modalities"] = count
    if "threshold" in options:
        options["threshold"] = router_losses.check_threshold(options["threshold"])
    return options


def check_router(name: str, options: dict, router: Any) -> None:
    """Raises ValueError if the router lacks what a loss in the table reads."""
    reads = FUNCTIONS[name].reads
    counts_all = "selected" in reads or options.get("choices") == "all"
    missing = None
    if not getattr(router, "has_expert_logits", True):
        missing = "one logit per expert"
    elif counts_all and getattr(router, "num_selected_experts", None) is None:
        missing = "num_selected_experts"
    elif "noise" in reads and not getattr(router, "noise_std", 0.0) > 0:
        missing = "noise_std > 0, which defines the load"
    if missing:
        raise ValueError(
            f"Expected a router with {missing}; received: "
            f"router={type(router).__name__}, loss={name!r}. Leave the loss out of "
            "auxiliary_losses."
        )
    if "threshold" in options and hasattr(router, "num_experts"):
        num_experts, modality = router.num_experts, options["modality"]
        pools = getattr(router, "expert_pools", None)
        if pools is not None and modality is not None:
            num_experts = len(pools[modality])
        router_losses.warn_of_unreachable_threshold(options["threshold"], num_experts)


def _load(routing, router, mask):
    return router_losses.load_loss(
        routing.logits,
        routing.noisy_logits,
        router.noise_std / router.num_experts,
        router.num_selected_experts,
        mask,
    )


def _load_balance(routing, router, mask, choices):
    counted = router.num_selected_experts if choices == "all" else 1
    return router_losses.load_balance_loss(routing.gates, mask, counted)


def _heterogeneous_balance(routing, router, mask):
    # The router knows which experts are zero-computation experts, and tau.
    selected = selected_experts(routing.affinity, router.num_selected_experts)
    return router_losses.heterogeneous_balance_loss(
        routing.gates, selected, router.expert_types, router.tau, mask
    )


def _global_entropy(routing, router, mask, threshold):
    # `check_router` has warned of the threshold.
    return router_losses.entropy_to_threshold(routing.logits, threshold, mask)


def _mutual_information(routing, router, mask, modality_ids, num_modalities):
    _check_modality_ids(modality_ids)
    losses = router_losses.mutual_information_loss(
        routing.logits, modality_ids, num_modalities, mask
    )
    # Groups with tokens of fewer than two modalities say nothing about these.
    present = [
        ops.any(router_losses.modality_mask(modality_ids, modality, mask), axis=1)
        for modality in range(num_modalities)
    ]
    several = sum(ops.cast(has_tokens, "int32") for has_tokens in present) >= 2
    return router_losses.over_counted_groups(losses, several)


def _of_logits(loss: Callable) -> Callable:
    return lambda routing, router, mask: loss(routing.logits, mask)


def _of_selected(loss: Callable) -> Callable:
    return lambda routing, router, mask: loss(
        routing.logits, router.num_selected_experts, mask
    )


def _over_tokens(loss: Callable) -> Callable:
    """A loss over all tokens or one modality's; groups without these do not count."""

    def compute(routing, router, mask, modality_ids, modality=None, **options):
        if modality is not None:
            _check_modality_ids(modality_ids)
            mask = router_losses.modality_mask(modality_ids, modality, mask)
        losses = loss(routing, router, mask, **options)
        if mask is None:
            return losses
        return router_losses.over_counted_groups(losses, ops.any(mask, axis=1))

    return compute


def _check_modality_ids(modality_ids):
    if modality_ids is None:
        raise ValueError(
            "Expected modality_ids for a loss of modalities; "
            "received: modality_ids=None"
        )


def _function(loss, *reads, **options) -> AuxiliaryFunction:
    return AuxiliaryFunction(_over_tokens(loss), options, reads)


FUNCTIONS = {
    "importance": _function(_of_logits(router_losses.importance_loss)),
    "load": _function(_load, "selected", "noise"),
    "load_balance": _function(_load_balance, choices="first"),
    "heterogeneous_balance": _function(_heterogeneous_balance, "selected"),
    "router_z": _function(_of_logits(router_losses.router_z_loss)),
    "local_entropy": _function(
        _of_logits(router_losses.local_entropy_loss), modality=None
    ),
    "global_entropy": _function(_global_entropy, threshold=None, modality=None),
    "mutual_information": AuxiliaryFunction(_mutual_information, {"num_modalities": 2}),
    "target_entropy": _function(
        _of_selected(router_losses.target_entropy_loss), "selected", modality=None
    ),
    "merged_entropy": _function(
        _of_selected(router_losses.merged_entropy_loss), "selected", modality=None
    ),
}
