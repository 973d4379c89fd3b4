"""Arguments of sparse upcycling as overrides of a backbone, for each of its towers.

Axes: E experts.
"""

from typing import Any

from keras_moe.checks import (
    argument_names,
    check_argument_names,
    check_bool,
    check_integer,
    check_one_of,
)
from keras_moe.layers.expert_coefficients import check_levels, total_experts
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.models.overrides import tower_families
from keras_moe.routers import ROUTERS, SoftRouter
from keras_moe.training.upcycling_presets import upcycling_settings

# Arguments of a backbone that an upcycled model may take.
MOE_ARGUMENTS = (
    "router_options",
    "num_selected_experts",
    "capacity_factor",
    "evaluation",
    "eval_capacity_factor",
    "eval_capacity",
    "dropless",
    "capacity_rounding",
    "capacity_multiple_of",
    "priority",
    "noise_std",
    "examples_per_group",
    "auxiliary_losses",
    "expert_dropout",
    "dispatcher",
    "zero_experts",
    "copy_experts",
    "constant_experts",
    "tau",
    "gating_residual",
    "num_modalities",
    "expert_pools",
    "mask_padding",
    "seed",
)
# Arguments of `upcycle` that each tower may have of its own.
_OF_TOWERS = ("num_experts", "moe_layers", "router", "normalize_gates", "preset")


def upcycling_overrides(backbone: type, towers: Any, arguments: dict) -> dict:
    """Overrides that make a dense backbone sparse, by tower."""
    families = tower_families(backbone)
    if not families:
        if towers is not None:
            raise ValueError(
                f"Expected towers=None for {backbone.__name__}, which has one tower; "
                f"received: towers={towers!r}"
            )
        return {None: _expert_overrides(backbone, **arguments)}
    if towers is None:
        towers = tuple(families)
    if not isinstance(towers, (dict, tuple, list)) or not towers:
        raise ValueError(
            f"Expected towers to name some of {list(families)}, or to be a dict of "
            f"arguments by tower; received: towers={towers!r}"
        )
    overrides = {}
    for name in towers:
        check_one_of("towers", name, tuple(families))
        own = towers[name] if isinstance(towers, dict) else {}
        if not isinstance(own, dict):
            raise ValueError(
                "Expected a dict of arguments for each tower; received: "
                f"towers[{name!r}]={own!r}"
            )
        check_argument_names(own, (*_OF_TOWERS, *MOE_ARGUMENTS), "towers")
        overrides[name] = _expert_overrides(families[name], **{**arguments, **own})
        if "seed" not in own:
            # That of all towers is the pair's: each derives one of its own from it.
            overrides[name].pop("seed", None)
    return overrides


def _expert_overrides(
    cls, num_experts, moe_layers, router, normalize_gates, preset, **moe_arguments
):
    """Checked overrides of one tower."""
    check_one_of("router", router, [*ROUTERS, MUMOE])
    is_mumoe = router == MUMOE
    # One expert is the dense MLP.
    if not is_mumoe:
        check_integer("num_experts", num_experts, minimum=2)
    elif total_experts(check_levels(num_experts)) < 2:
        raise ValueError(
            f"Expected at least two experts; received: num_experts={num_experts}"
        )
    check_argument_names(moe_arguments, MOE_ARGUMENTS, "MoE layers")
    settings = upcycling_settings(preset, router)
    normalizes = settings.pop("normalize_gates", True)
    if normalize_gates is not None:
        normalizes = check_bool("normalize_gates", normalize_gates)
    moe_arguments = {**settings, **moe_arguments}
    if "mask_padding" not in argument_names(cls):
        # Images have no padding.
        moe_arguments.pop("mask_padding", None)
    options = dict(moe_arguments.pop("router_options", None) or {})
    is_soft = not is_mumoe and issubclass(ROUTERS[router][0], SoftRouter)
    if normalizes and not is_mumoe and not is_soft:
        options.setdefault("normalize_gates", "after")
    return {
        "moe_layers": moe_layers,
        "num_experts": num_experts,
        "router": router,
        "router_options": options,
        **moe_arguments,
    }
