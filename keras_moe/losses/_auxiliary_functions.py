"""The table of auxiliary losses: how each reads a routing record and its router.

Axes: G groups, S group_size, E experts, K selected experts, M modalities.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_moe.checks import check_argument_names, check_integer, check_one_of
from keras_moe.losses import router_losses
from keras_moe.ops.token_choice import selected_experts

# The choices of a token that a balance loss counts.
CHOICES = ("first", "all")


class AuxiliaryFunction(NamedTuple):
    """A loss `compute(routing, router, mask, modality_ids, **options)`, (G,).

    `options` are its options with their defaults; each of `checks` raises an error for
    a router without what the loss reads.
    """

    compute: Callable[..., Any]
    options: dict[str, Any] = {}
    checks: tuple[Callable[..., None], ...] = ()


def checked_options(name: str, options: dict) -> dict:
    """All options of a loss in the table, checked."""
    defaults = FUNCTIONS[name].options
    check_argument_names(options, list(defaults), f"the auxiliary loss {name!r}")
    return {
        option: OPTION_CHECKS[option](value)
        for option, value in {**defaults, **options}.items()
    }


def _check_modality(modality):
    if modality is None:
        return None
    return check_integer("modality", modality, minimum=0)


OPTION_CHECKS = {
    "choices": lambda choices: check_one_of("choices", choices, CHOICES),
    "modality": _check_modality,
    "num_modalities": lambda count: check_integer("num_modalities", count),
    "threshold": router_losses.check_threshold,
}


def _has_expert_logits(router, name, options):
    if not getattr(router, "has_expert_logits", True):
        raise ValueError(
            "Expected a router with one logit per expert; received: "
            f"router={type(router).__name__}, loss={name!r}. Leave the loss out of "
            "auxiliary_losses."
        )


def _has_selected_experts(router, name, options):
    if getattr(router, "num_selected_experts", None) is None:
        raise ValueError(
            "Expected a router with num_selected_experts; received: "
            f"router={type(router).__name__}, loss={name!r}. Leave the loss out of "
            "auxiliary_losses."
        )


def _has_counted_choices(router, name, options):
    if options["choices"] == "all":
        _has_selected_experts(router, name, options)


def _has_noise(router, name, options):
    noise_std = getattr(router, "noise_std", 0.0)
    if not noise_std > 0:
        raise ValueError(
            "Expected a router with noise_std > 0, since noise defines the load "
            f"loss; received: noise_std={noise_std}. Leave the load loss out of "
            "auxiliary_losses to train without noise."
        )


def _has_modality(router, name, options):
    count = getattr(router, "modality_count", None)
    if count and (options["modality"] or 0) >= count:
        raise ValueError(
            f"Expected a modality of the router's, 0 to {count - 1}; received: "
            f"modality={options['modality']}, loss={name!r}"
        )


def _has_reachable_threshold(router, name, options):
    num_experts = getattr(router, "num_experts", None)
    if num_experts is None:
        return
    pools = getattr(router, "expert_pools", None)
    if pools is not None and options["modality"] is not None:
        num_experts = len(pools[options["modality"]])
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
    # `_has_reachable_threshold` has warned of the threshold.
    return router_losses.entropy_to_threshold(routing.logits, threshold, mask)


def _mutual_information(routing, router, mask, modality_ids, num_modalities):
    _check_modality_ids(modality_ids, {"num_modalities": num_modalities})
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
    """A loss over all tokens, or over those of one modality.

    Groups without such a token do not count in the mean over groups.
    """

    def compute(routing, router, mask, modality_ids, modality=None, **options):
        if modality is not None:
            _check_modality_ids(modality_ids, {"modality": modality})
            mask = router_losses.modality_mask(modality_ids, modality, mask)
        losses = loss(routing, router, mask, **options)
        if mask is None:
            return losses
        return router_losses.over_counted_groups(losses, ops.any(mask, axis=1))

    return compute


def _check_modality_ids(modality_ids, options):
    if modality_ids is None:
        described = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(
            "Expected modality_ids, by which the loss finds the tokens of a modality; "
            f"received: modality_ids=None, {described}"
        )


def _function(compute, *checks, **options) -> AuxiliaryFunction:
    return AuxiliaryFunction(compute, options, (_has_expert_logits, *checks))


FUNCTIONS = {
    "importance": _function(_over_tokens(_of_logits(router_losses.importance_loss))),
    "load": _function(_over_tokens(_load), _has_selected_experts, _has_noise),
    "load_balance": _function(
        _over_tokens(_load_balance), _has_counted_choices, choices="first"
    ),
    "heterogeneous_balance": _function(
        _over_tokens(_heterogeneous_balance), _has_selected_experts
    ),
    "router_z": _function(_over_tokens(_of_logits(router_losses.router_z_loss))),
    "local_entropy": _function(
        _over_tokens(_of_logits(router_losses.local_entropy_loss)),
        _has_modality,
        modality=None,
    ),
    "global_entropy": _function(
        _over_tokens(_global_entropy),
        _has_modality,
        _has_reachable_threshold,
        threshold=None,
        modality=None,
    ),
    "mutual_information": _function(_mutual_information, num_modalities=2),
    "target_entropy": _function(
        _over_tokens(_of_selected(router_losses.target_entropy_loss)),
        _has_selected_experts,
        _has_modality,
        modality=None,
    ),
    "merged_entropy": _function(
        _over_tokens(_of_selected(router_losses.merged_entropy_loss)),
        _has_selected_experts,
        _has_modality,
        modality=None,
    ),
}
