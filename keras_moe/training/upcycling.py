"""Sparse upcycling: a dense model becomes a mixture of experts of itself.

Axes: B batch, N tokens, E experts, K selected experts.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_moe.checks import (
    argument_names,
    check_argument_names,
    check_integer,
    check_not_negative,
    check_one_of,
)
from keras_moe.compat import flatten_layers
from keras_moe.layers.multilinear_experts import check_levels, total_experts
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.models import Blueprint, convert, registry
from keras_moe.models.conversion import is_convertible
from keras_moe.models.overrides import apply_overrides, moe_names, tower_families
from keras_moe.routers import ROUTERS, SoftRouter, TokenChoiceRouter
from keras_moe.training._upcycled import (
    UpcyclingReport,
    carry_state,
    copy_weights,
    example_inputs,
    report_of,
)

# `normalize_gates` of `upcycle`, `mask_padding` of text towers, MoE layers' arguments.
UPCYCLING_PRESETS = {
    # *CLIP-UP*, Table 3 and section 2.2; gates are normalised in appendix B.3 alone.
    "clip_up": {
        "normalize_gates": False,
        "noise_std": 0.0,
        "auxiliary_losses": {"load_balance": 0.01, "router_z": 1e-4},
        "num_selected_experts": 2,
        # The paper's 2.0 is Switch's convention, C = 2.0 S / E whatever K is; here C is
        # K times the factor.
        "capacity_factor": 1.0,
        "priority": "first_come",
        # Appendix B.3: the text encoder routes padding, which takes up capacity.
        "mask_padding": False,
    }
}


# The dense model decides on these, or arguments of `upcycle` do.
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
    num_experts: Any = 8,
    moe_layers: Any = "every_2",
    router: str = "softmax_token_choice",
    noise: float = 0.0,
    normalize_gates: bool | str | None = None,
    preset: str | None = None,
    carry_optimizer: bool = False,
    images: Any = None,
    noise_seed: int = 0,
    towers: Any = None,
    **moe_arguments,
) -> tuple[Any, UpcyclingReport]:
    """Turns a dense model into a mixture of experts.

    Every expert starts as a copy of the dense MLP that it replaces, routers start
    fresh, and everything else is unchanged. If gates sum to one and no token is
    dropped, the copies together compute what the MLP did, so that training continues
    where it was: so it is with token choice and the defaults here. Expert choice leaves
    tokens out, and soft routing mixes them, which changes the function.

    Args:
        dense_model: model without MoE blocks: a `ViTBackbone`, a `MixerBackbone` or an
            image classifier on one; a `TextBackbone`; a `CLIPBackbone` with two towers,
            a `LIMoEBackbone` with one for both modalities, or a `ContrastiveModel` on
            either; or a backbone of KerasHub: `ViTBackbone`, or a `CLIPBackbone` or
            `SigLIPBackbone`, of which the vision encoder is taken.
        num_experts: E, at least 2; with muMoE also one number for each level.
        moe_layers: the blocks to upcycle; see `keras_moe.layers.resolve_moe_layers`.
        router: a router that `keras_moe.routers.get` knows; or `"mumoe"`, whose experts
            all start as the best approximation of the MLP that `rank`
            can hold (a truncated singular value decomposition); the report has the
            difference.
        noise: standard deviation of normal noise on each expert's weights, relative to
            the standard deviation of the weight, so that experts differ at once. With
            muMoE, noise on the first level's expert factors.
        normalize_gates: divide a token's combine weights by their sum after routing.
            With K = 1 that makes each of them 1, and auxiliary losses alone train the
            router. None does, unless the preset says otherwise; `"before"` divides
            before routing.
        preset: None; or `"clip_up"`, the settings of *CLIP-UP*'s main results: K = 2,
            gates as they are, capacity factor 1.0 (2.0 as Switch and the paper count,
            without K), first come first served, no noise, the auxiliary losses load
            balance (0.01) and z (1e-4), and texts whose padding is routed like any
            other token (`mask_padding=False`). The function is then not preserved: a
            token's K gates sum to less than one. Experts (8) and blocks (every other)
            are the defaults here. Other arguments override it.
        carry_optimizer: give the new model the state of a compiled dense one's
            optimizer, too: iterations, and slots, which are tiled as the weights are.
        images: (B, height, width, channels), at least one, for the report's difference;
            for texts and image-text models the dict that the backbone takes; None uses
            four examples of noise.
        noise_seed: seed of `noise`.
        towers: towers of a `CLIPBackbone` to upcycle: None for both, a tuple such as
            `("image",)`, which leaves the other tower as it is, or a dict from tower to
            arguments that override those here, such as
            `{"image": {"num_experts": 16}, "text": {}}`. None for models of one tower.
        **moe_arguments: further arguments of the backbone that concern its MoE
            layers, such as `num_selected_experts=1`, or `zero_experts=1` for MoE++;
            the others are the backbone's defaults, whatever the dense model's are.

    Returns:
        `(model, report)`. The dense model is left as it was. The new one is compiled
        alike, and frozen layers stay frozen. The report of an image-text model has
        results by modality, too.

    Raises:
        ValueError: if the model is not dense or unknown, has low-rank pairs or is
            quantised, or there is no optimizer to carry over.

    Reference:
        *Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints*,
        section 3; *CLIP-UP*, section 2.2, Table 3 and appendix B.3, for its preset.

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
    own_model = _as_own(dense_model)
    if carry_optimizer and own_model is not dense_model:
        raise ValueError(
            "Expected a model of this library for carry_optimizer=True; "
            f"received: {type(dense_model).__name__}"
        )
    dense_model = own_model
    backbone = getattr(dense_model, "backbone", dense_model)
    arguments = {
        "num_experts": num_experts,
        "moe_layers": moe_layers,
        "router": router,
        "normalize_gates": normalize_gates,
        "preset": preset,
        **moe_arguments,
    }
    overrides = upcycling_overrides(type(backbone), towers, arguments)
    if images is None:
        images = example_inputs(backbone)
    _check_inputs(backbone, images)
    _check_dense(dense_model, overrides)
    if carry_optimizer and not getattr(dense_model, "optimizer", None):
        raise ValueError(
            "Expected a compiled model for carry_optimizer=True; "
            f"received: {type(dense_model).__name__} without an optimizer"
        )
    sparse_model = _sparse_twin(dense_model, overrides, moe_arguments)
    blocks = _new_blocks(dense_model, sparse_model, overrides)
    copy_weights(dense_model, sparse_model, noise, noise_seed)
    _freeze(dense_model, sparse_model)
    if getattr(dense_model, "compiled", False):
        _compile(dense_model, sparse_model)
    slots = 0
    if carry_optimizer and dense_model.optimizer.built:
        sparse_model.optimizer.build(sparse_model.trainable_variables)
        slots = carry_state(dense_model.optimizer, sparse_model.optimizer)
    report = report_of(dense_model, sparse_model, blocks, images, noise, slots)
    return sparse_model, report


def _new_blocks(dense_model, sparse_model, overrides):
    """The names of the blocks that got experts, at least one in each tower."""
    dense, sparse = (getattr(x, "backbone", x) for x in (dense_model, sparse_model))
    blocks = [name for name in sparse.routing if name not in dense.routing]
    for tower, arguments in overrides.items():
        if not _names_of(tower, blocks):
            raise ValueError(
                "Expected at least one block to upcycle; received: "
                f"moe_layers={arguments['moe_layers']}"
            )
    return blocks


def _check_inputs(backbone, inputs):
    """Raises ValueError unless the inputs fit, with at least one example."""
    if isinstance(backbone.input, dict):
        if not isinstance(inputs, dict):
            raise ValueError(
                f"Expected images to be a dict of {sorted(backbone.input)} for "
                f"{type(backbone).__name__}; received: {type(inputs).__name__}"
            )
        backbone._check_inputs(inputs)
        shapes = {name: tuple(np.shape(x)) for name, x in inputs.items()}
        if not all(shape and shape[0] for shape in shapes.values()):
            raise ValueError(f"Expected at least one example; received: {shapes}")
        return
    shape = tuple(np.shape(inputs))
    if shape[1:] != backbone.image_shape or not shape[0]:
        raise ValueError(
            f"Expected images (B, {', '.join(map(str, backbone.image_shape))}), at "
            f"least one; received: images.shape={shape}"
        )


def _check_dense(model, towers):
    """Raises ValueError unless the towers are dense, and weights are plain."""
    routing = getattr(model, "backbone", model).routing
    if sparse := [name for tower in towers for name in _names_of(tower, routing)]:
        raise ValueError(
            "Expected a dense model; received: one with mixtures of experts in "
            f"{sparse}"
        )
    for layer in flatten_layers(model):
        if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
            raise ValueError(
                "Expected a model of plain weights (saving merges low-rank pairs); "
                f"received: {layer.path!r} with lora_enabled="
                f"{getattr(layer, 'lora_enabled', False)}, "
                f"quantization_mode={layer.quantization_mode!r}"
            )


def _names_of(tower, names):
    """The names of a tower's blocks; of all blocks without towers."""
    return [name for name in names if tower is None or name.startswith(f"{tower}/")]


def _as_own(model):
    """The model itself, or a converted model of KerasHub."""
    if registry.is_registered(type(getattr(model, "backbone", model))):
        return model
    if not is_convertible(model):
        raise ValueError(
            f"Expected a model with one of {registry.backbone_names()}, or a ViT, CLIP "
            "or SigLIP of KerasHub; received: "
            f"{model if isinstance(model, str) else type(model).__name__}"
        )
    # Of an image-text model the image tower.
    return convert(model, tower="image")[0]


def _sparse_twin(dense_model, overrides, moe_arguments):
    """A new model like the dense one, but for its MoE blocks."""
    blueprint = Blueprint.of_model(dense_model)
    families = tower_families(blueprint.backbone)
    config = dict(blueprint.config)
    for tower, arguments in overrides.items():
        if tower is None:
            config = _with_experts(blueprint.backbone, config, arguments)
        else:
            config[tower] = _with_experts(families[tower], config[tower], arguments)
    if families and "seed" in moe_arguments:
        config["seed"] = moe_arguments["seed"]
    return dataclasses.replace(blueprint, config=config).build()


def _with_experts(cls, config, arguments):
    # Without settings of experts that the dense model does not have.
    config = {name: value for name, value in config.items() if name != "moe"}
    return apply_overrides(cls, config, arguments)


def _freeze(dense_model, sparse_model):
    frozen = {
        layer.path
        for layer in flatten_layers(dense_model, include_self=False)
        if not layer.trainable
    }
    for layer in flatten_layers(sparse_model, include_self=False):
        if layer.path in frozen:
            layer.trainable = False


def _compile(dense_model, sparse_model):
    """Compiles like the dense model, with a new optimizer."""
    # Keras cannot compile a model with a custom `compile` from a config.
    config = dict(dense_model.get_compile_config() or {})
    config.pop("loss", None)
    try:
        config = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "Expected a model whose optimizer and metrics can be serialised, or one "
            f"that is not compiled; received: {error}"
        ) from error
    sparse_model.compile(loss=dense_model.loss, **config)


# Arguments


def free_arguments() -> list[str]:
    """Arguments of a backbone that an upcycled model may take."""
    names = [name for name in moe_names() if name not in _NOT_FREE]
    return [*names, "mask_padding", "seed"]


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
        check_argument_names(own, [*_OF_TOWERS, *free_arguments()], "towers")
        overrides[name] = _expert_overrides(families[name], **{**arguments, **own})
        if "seed" not in own:
            # Each tower derives its seed from the whole model's.
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
    check_argument_names(moe_arguments, free_arguments(), "MoE layers")
    settings = upcycling_settings(preset, router)
    normalizes = settings.pop("normalize_gates", True)
    if normalize_gates is not None:
        normalizes = check_one_of(
            "normalize_gates", normalize_gates, (True, False, "before", "after")
        )
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


def upcycling_settings(preset: str | None, router: str) -> dict:
    """Arguments of `upcycle` by the name of a preset."""
    if preset is None:
        return {}
    check_one_of("preset", preset, UPCYCLING_PRESETS)
    if router == MUMOE or ROUTERS[router][0] is not TokenChoiceRouter:
        raise ValueError(
            f"Expected a token choice router for preset={preset!r}; "
            f"received: router={router!r}"
        )
    return dict(UPCYCLING_PRESETS[preset])
