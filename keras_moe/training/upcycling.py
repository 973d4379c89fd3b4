"""Sparse upcycling: initialises a mixture of experts from a dense model.

Axes: B batch, N tokens, E experts, K selected experts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_moe._checks import (
    argument_names,
    check_argument_names,
    check_integer,
    check_not_negative,
    check_one_of,
    check_share,
    unfit,
)
from keras_moe._compat import flatten_layers
from keras_moe._freezing import copy_freezing
from keras_moe._types import Structure
from keras_moe.layers import MLP
from keras_moe.layers.moe_config import MUMOE
from keras_moe.layers.multilinear_experts import check_levels
from keras_moe.models import Blueprint, convert, registry
from keras_moe.models.loading import _overrides
from keras_moe.models.saving._lora import TRAINING
from keras_moe.routers import ROUTERS, SoftRouter, TokenChoiceRouter
from keras_moe.training import _upcycled

# `normalize_gates` of `upcycle`, `mask_padding` of text towers, MoE layers' arguments.
UPCYCLING_PRESETS = {
    # *CLIP-UP*, Table 3 and section 2.2; only appendix B.3 normalises gates.
    "clip_up": {
        "normalize_gates": False,
        "noise_std": 0.0,
        "auxiliary_losses": {"load_balance": 0.01, "router_z": 1e-4},
        "num_selected_experts": 2,
        # The paper's 2.0 follows Switch: C = 2.0 S / E for any K. Here C = K * factor *
        # S / E.
        "capacity_factor": 1.0,
        "priority": "first_come",
        # Section 2.2 routes all tokens of a batch.
        "examples_per_group": None,
        # Appendix B.3: the text encoder routes padding, which takes up capacity.
        "mask_padding": False,
    },
    # *MoE++*, Table 2 and appendix B.2; its released code normalises gates.
    "moepp": {
        "normalize_gates": "before",
        "noise_std": 0.0,
        "auxiliary_losses": {"heterogeneous_balance": 0.01},
        "num_selected_experts": 2,
        "capacity_factor": 1.1,
        "zero_experts": 1,
        "copy_experts": 1,
        "constant_experts": 2,
        "tau": 0.75,
    },
}


# Determined by the dense model or by arguments of `upcycle`.
_NOT_FREE = (
    "moe_layers",
    "num_experts",
    "router",
    "normalize_gates",
    "expert_mlp_dim",
    "expert_activation",
    "expert_use_bias",
    "gated_experts",
    "shared_expert_initialization",
    "pruning",
)
# Arguments of `upcycle` that may differ by tower.
_OF_TOWERS = ("num_experts", "moe_layers", "router", "normalize_gates", "preset")


def upcycle(
    dense_model: Any,
    num_experts: int | Sequence[int] = 8,
    moe_layers: str | int | Sequence[int] = "every_2",
    *,
    router: str = "softmax_token_choice",
    noise: float = 0.0,
    reinitialize: float = 0.0,
    normalize_gates: bool | str | None = None,
    preset: str | None = None,
    carry_optimizer: bool = False,
    images: "Structure | None" = None,
    noise_seed: int = 0,
    towers: Sequence[str] | dict[str, dict] | None = None,
    **moe_arguments,
) -> tuple[Any, _upcycled.UpcyclingReport]:
    """Turns a dense model into a mixture of experts.

    Every expert starts as a copy of the MLP that it replaces, routers start from
    scratch, and all other weights are copied. If gates sum to one and no token is
    dropped, as with the defaults, the experts together compute what the MLP did.
    Expert choice skips tokens and soft routing mixes them, which changes the function.

    Args:
        dense_model: a model of this library without MoE blocks; a KerasHub
            `ViTBackbone`, `CLIPBackbone` or `SigLIPBackbone` (its vision encoder); or
            one of KerasHub's language models that `convert` knows, such as
            `LlamaCausalLM`, which becomes a `CausalLM`.
        num_experts: E, at least 2; for muMoE optionally a number per level.
        moe_layers: blocks to upcycle; see `keras_moe.layers.resolve_moe_layers`.
        router: a router for `keras_moe.routers.get`; or `"mumoe"`, where every expert
            starts as the best approximation of the MLP that `rank` can hold (a
            truncated singular value decomposition).
        noise: standard deviation of noise added to each expert's weights, relative to
            that of the weights. For muMoE, noise on the first level's expert factors.
        reinitialize: share of each expert's hidden units, others in each, that is drawn
            again from a normal distribution with the mean and deviation of the weights
            that it replaces, so that experts differ: 0.5 in *Drop-Upcycling*. Not for
            muMoE, and without `carry_optimizer`.
        normalize_gates: whether to divide a token's combine weights by their sum after
            routing; `"before"` divides before routing. With K = 1 normalised gates are
            all 1, so only auxiliary losses train the router. None means yes, unless the
            preset differs.
        preset: `"clip_up"` for the main settings of *CLIP-UP*: K = 2, unnormalised
            gates, capacity factor 1.0 (2.0 in the paper, which leaves out K), first
            come first served, load balance loss (0.01) and z-loss (1e-4), and routed
            padding in texts. Gates then sum to less than one, so the function changes.
            `"moepp"` for MoE++'s: K = 2, a zero, a copy and two constant experts beside
            the copies of the MLP, capacity factor 1.1, tau 0.75 and its balance loss.
            Other arguments override the preset.
        carry_optimizer: whether to copy the optimizer state of a compiled model of this
            library, too.
        images: (B, height, width, channels) images, or a dict of inputs, for the
            report's differences. None uses four examples of noise.
        noise_seed: seed of `noise` and `reinitialize`.
        towers: towers of a `CLIPBackbone` to upcycle: None for both, a tuple such as
            `("image",)`, or a dict with overrides of the arguments per tower, such as
            `{"image": {"num_experts": 16}, "text": {}}`.
        **moe_arguments: further MoE arguments of the backbone, such as
            `num_selected_experts=1`, or `zero_experts=1` for MoE++.

    Returns:
        `(model, report)`: a new model, compiled and frozen like the dense one, and an
        `UpcyclingReport`.

    Reference: *Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints*,
        section 3; *CLIP-UP*, section 2.2, Table 3 and appendix B.3, for its preset;
        *Drop-Upcycling*, section 3, for `reinitialize`.

    Example:

    >>> from keras_moe import models, training
    >>> dense = models.from_preset(
    ...     "vmoe_digits", num_classes=10, moe_layers=None, load_weights=False
    ... )
    >>> sparse, report = training.upcycle(dense, num_experts=4)
    >>> report.blocks, report.largest_difference < 1e-4
    (('block_1', 'block_3'), True)
    """
    check_not_negative("noise", noise)
    check_share("reinitialize", reinitialize)
    if reinitialize and (carry_optimizer or router == MUMOE):
        given = {"router": router, "carry_optimizer": carry_optimizer}
        expected = "experts with units of their own and a new optimizer"
        raise unfit(expected, reinitialize=reinitialize, **given)
    arguments = {
        "num_experts": num_experts,
        "moe_layers": moe_layers,
        "router": router,
        "normalize_gates": normalize_gates,
        "preset": preset,
        **moe_arguments,
    }
    if not registry.is_registered(type(getattr(dense_model, "backbone", dense_model))):
        # Of KerasHub; of image-text models the image tower.
        is_pair = hasattr(dense_model, "vision_encoder")
        dense_model = convert(dense_model, tower="image" if is_pair else None)[0]
    if carry_optimizer and not getattr(dense_model, "optimizer", None):
        expected = "a compiled model for carry_optimizer=True"
        raise unfit(expected, f"{type(dense_model).__name__} without an optimizer")
    backbone = getattr(dense_model, "backbone", dense_model)
    overrides = _upcycling_overrides(type(backbone), towers, arguments)
    if images is None:
        images = _upcycled.example_inputs(backbone)
    _check_dense(dense_model, overrides)
    sparse_model = _sparse_twin(dense_model, overrides, moe_arguments)
    sparse_backbone: Any = getattr(sparse_model, "backbone", sparse_model)
    blocks = [name for name in sparse_backbone.routing if name not in backbone.routing]
    for tower, own in overrides.items():
        if not _names_of(tower, blocks):
            raise unfit("at least one block to upcycle", moe_layers=own["moe_layers"])
    sources = _upcycled.copy_weights(
        dense_model, sparse_model, noise, reinitialize, noise_seed
    )
    is_changed = noise > 0 or reinitialize > 0
    report = _upcycled.report_of(dense_model, sparse_model, blocks, images, is_changed)
    if getattr(dense_model, "compiled", False):
        _compile(dense_model, sparse_model)
    copies = ("moe/experts", "moe/shared_experts")
    copy_freezing(dense_model, sparse_model, {"mlp": copies})
    if carry_optimizer and dense_model.optimizer.built:
        # After freezing, since only trainable weights have slots.
        sparse_model.optimizer.build(sparse_model.trainable_variables)
        optimizers = dense_model.optimizer, sparse_model.optimizer
        slots = _upcycled.carry_state(*optimizers, sources)
        report = report._replace(slots=slots)
    return sparse_model, report


def _check_dense(model, towers):
    routing = getattr(model, "backbone", model).routing
    if sparse := [name for tower in towers for name in _names_of(tower, routing)]:
        raise unfit("a dense model", f"one with mixtures of experts in {sparse}")
    is_mumoe = any(arguments["router"] == MUMOE for arguments in towers.values())
    for layer in flatten_layers(model):
        if isinstance(layer, MLP) and layer.gated and is_mumoe:
            expected = "MLPs without gates for router='mumoe', whose layers have none"
            raise unfit(expected, f"{layer.path!r} with gated=True")
        has_lora = getattr(layer, "lora_enabled", False)
        if has_lora or layer.quantization_mode:
            expected = "a model of plain weights (saving merges LoRA adapters)"
            modes = {"lora_enabled": has_lora}
            modes["quantization_mode"] = layer.quantization_mode
            raise unfit(expected, layer.path, **modes)


def _names_of(tower, names):
    return [name for name in names if tower is None or name.startswith(f"{tower}/")]


def _sparse_twin(dense_model, overrides, moe_arguments):
    """Builds a model like the dense one except for its MoE blocks."""
    blueprint = Blueprint.of_model(dense_model)
    families = _overrides.tower_families(blueprint.backbone)
    config, task_config = (
        {name: value for name, value in each.items() if name not in TRAINING}
        for each in (blueprint.config, blueprint.task_config)
    )
    for tower, arguments in overrides.items():
        cls = blueprint.backbone if tower is None else families[tower]
        own = config if tower is None else config[tower]
        # Without expert settings, which the dense model does not use.
        own = {name: value for name, value in own.items() if name != "moe"}
        if arguments["router"] != MUMOE:
            # Experts are like the MLPs that they replace.
            arguments = {
                "gated_experts": own.get("gated_mlp", False),
                "expert_use_bias": own.get("use_bias", True),
                **arguments,
            }
        own = _overrides.apply_overrides(cls, own, arguments)
        config = own if tower is None else {**config, tower: own}
    if families and "seed" in moe_arguments:
        config["seed"] = moe_arguments["seed"]
    blueprint = dataclasses.replace(blueprint, config=config, task_config=task_config)
    return blueprint.build()


def _compile(dense_model, sparse_model):
    """Compiles like the dense model, with a new optimizer."""
    # Keras cannot restore a custom `compile` from a config.
    config = dict(dense_model.get_compile_config() or {})
    config.pop("loss", None)
    config = keras.saving.deserialize_keras_object(config)
    if hasattr(dense_model, "sampler"):
        config["sampler"] = dense_model.sampler
    sparse_model.compile(loss=dense_model.loss, **config)


def free_arguments() -> list[str]:
    """Returns the backbone arguments that may be passed to `upcycle`."""
    names = [name for name in _overrides.moe_names() if name not in _NOT_FREE]
    return [*names, "mask_padding", "seed"]


def _upcycling_overrides(backbone, towers, arguments):
    """Returns the overrides that make a dense backbone sparse, by tower."""
    families = _overrides.tower_families(backbone)
    if not families:
        if towers is not None:
            expected = f"towers=None for {backbone.__name__}, which has one tower"
            raise unfit(expected, towers=towers)
        return {None: _expert_overrides(backbone, **arguments)}
    if towers is None:
        towers = tuple(families)
    if not towers:
        raise ValueError(f"Expected at least one tower; received: towers={towers!r}")
    overrides = {}
    for name in towers:
        check_one_of("towers", name, tuple(families))
        own = towers[name] if isinstance(towers, dict) else {}
        check_argument_names(own, [*_OF_TOWERS, *free_arguments()], "towers")
        overrides[name] = _expert_overrides(families[name], **{**arguments, **own})
        if "seed" not in own:
            # Each tower derives its seed from the model's.
            overrides[name].pop("seed", None)
    return overrides


def _expert_overrides(
    cls, num_experts, moe_layers, router, normalize_gates, preset, **moe_arguments
):
    """Returns the checked overrides of one tower."""
    check_one_of("router", router, [*ROUTERS, MUMOE])
    is_mumoe = router == MUMOE
    total = math.prod(check_levels(num_experts)) if is_mumoe else num_experts
    # A single expert would be the dense MLP.
    check_integer("num_experts", total, minimum=2)
    check_argument_names(moe_arguments, free_arguments(), "MoE layers")
    settings = {"normalize_gates": True}
    if preset is not None:
        check_one_of("preset", preset, UPCYCLING_PRESETS)
        if is_mumoe or ROUTERS[router][0] is not TokenChoiceRouter:
            raise unfit(f"a token choice router for preset={preset!r}", router=router)
        settings = dict(UPCYCLING_PRESETS[preset])
    normalizes = settings.pop("normalize_gates")
    if normalize_gates is not None:
        allowed = (True, False, "before", "after")
        normalizes = check_one_of("normalize_gates", normalize_gates, allowed)
    moe_arguments = {**settings, **moe_arguments}
    if "mask_padding" not in argument_names(cls):
        # Images have no padding.
        moe_arguments.pop("mask_padding", None)
    is_soft = not is_mumoe and issubclass(ROUTERS[router][0], SoftRouter)
    if normalizes and not is_mumoe and not is_soft:
        moe_arguments["normalize_gates"] = "after" if normalizes is True else normalizes
    return {
        "moe_layers": moe_layers,
        "num_experts": num_experts,
        "router": router,
        **moe_arguments,
    }
