"""Sparse upcycling: a dense model becomes a mixture of experts of itself.

Axes: B batch, N tokens, E experts, K selected experts.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_moe.checks import check_not_negative
from keras_moe.compat import flatten_layers
from keras_moe.models import Blueprint, convert, describe, registry
from keras_moe.models.conversion import is_convertible
from keras_moe.models.overrides import apply_overrides, tower_families
from keras_moe.training.upcycled_weights import carry_state, copy_weights
from keras_moe.training.upcycling_arguments import upcycling_overrides
from keras_moe.training.upcycling_report import (
    UpcyclingReport,
    example_inputs,
    largest_differences,
    modality_reports,
    preserves,
)


def upcycle(
    dense_model: Any,
    num_experts: Any = 8,
    moe_layers: Any = "every_2",
    router: str = "softmax_token_choice",
    noise: float = 0.0,
    normalize_gates: bool | None = None,
    preset: str | None = None,
    carry_optimizer: bool = False,
    images: Any = None,
    noise_seed: int = 0,
    towers: Any = None,
    **moe_arguments,
) -> tuple[Any, UpcyclingReport]:
    """Turns a dense model into its mixture of experts.

    Every expert starts as a copy of the dense MLP in its place, routers start fresh,
    and everything else is unchanged. With gates that sum to one and no token dropped
    the copies together do what the MLP did, so that training continues where it was:
    the case of token choice as it is by default here. Expert choice leaves tokens out,
    and soft routing mixes them: the function changes.

    Args:
        dense_model: model without MoE blocks: a `ViTBackbone`, a `MixerBackbone` or an
            image classifier on one; a `TextBackbone`; a `CLIPBackbone` with two towers,
            a `LIMoEBackbone` with one for both modalities, or a `ContrastiveModel` on
            either; or a backbone of KerasHub: `ViTBackbone`, or a `CLIPBackbone` or
            `SigLIPBackbone`, whose vision encoder is taken.
        num_experts: E, at least 2; with muMoE also one number for each level.
        moe_layers: the blocks to upcycle; see `keras_moe.layers.resolve_moe_layers`.
        router: router that `keras_moe.routers.get` knows; or `"mumoe"`, whose experts
            all start as the best approximation of the MLP that the ranks in
            `router_options` hold (a truncated singular value decomposition): the report
            says how near.
        noise: standard deviation of normal noise on each expert's weights, as a share
            of the standard deviation of the weight; experts then differ at once. With
            muMoE of the first level's expert factors.
        normalize_gates: divide a token's combine weights by their sum after routing.
            With K = 1 that makes each of them 1, and auxiliary losses alone train the
            router. None does, unless the preset says otherwise.
            `router_options={"normalize_gates": ...}` overrides it.
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
            for texts and pairs the dict that the backbone takes; None takes four
            examples of noise.
        noise_seed: seed of `noise`.
        towers: towers of a `CLIPBackbone` to upcycle: None for both, a tuple such as
            `("image",)`, which leaves the other tower as it is, or a dict from tower to
            arguments that override those here, such as
            `{"image": {"num_experts": 16}, "text": {}}`. None for models of one tower.
        **moe_arguments: further arguments of the backbone that concern its MoE
            layers, such as `num_selected_experts=1`, or `zero_experts=1` for MoE++;
            the backbone's defaults otherwise, whatever the dense model's are.

    Returns:
        `(model, report)`. The dense model is left as it was. The new one is
        compiled alike, and frozen layers stay frozen. The report of a model of pairs
        has results by modality, too.

    Raises:
        ValueError: if the model is not dense or unknown, has low-rank pairs or is
            quantised, an argument is out of range, or there is no optimizer to carry
            over.

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
    original = dense_model
    dense_model = _as_own(original)
    if carry_optimizer and dense_model is not original:
        raise ValueError(
            "Expected a model of this library for carry_optimizer=True; "
            f"received: {type(original).__name__}"
        )
    backbone = getattr(dense_model, "backbone", dense_model)
    overrides = upcycling_overrides(
        type(backbone),
        towers,
        {
            "num_experts": num_experts,
            "moe_layers": moe_layers,
            "router": router,
            "normalize_gates": normalize_gates,
            "preset": preset,
            **moe_arguments,
        },
    )
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
    sparse_backbone = getattr(sparse_model, "backbone", sparse_model)
    blocks = [name for name in sparse_backbone.routing if name not in backbone.routing]
    for tower, arguments in overrides.items():
        if not _names_of(tower, blocks):
            raise ValueError(
                "Expected at least one block to upcycle; received: "
                f"moe_layers={arguments['moe_layers']}"
            )
    copy_weights(dense_model, sparse_model, noise, noise_seed)
    _freeze(dense_model, sparse_model)
    if getattr(dense_model, "compiled", False):
        _compile(dense_model, sparse_model)
    slots = 0
    if carry_optimizer and dense_model.optimizer.built:
        sparse_model.optimizer.build(sparse_model.trainable_variables)
        slots = carry_state(dense_model.optimizer, sparse_model.optimizer)

    description = describe(sparse_model)
    differences = largest_differences(dense_model, sparse_model, images)
    report = UpcyclingReport(
        blocks=tuple(blocks),
        dense_parameters=describe(dense_model).parameters,
        parameters=description.parameters,
        active_parameters=description.active_parameters,
        largest_difference=max(differences[0].values()),
        largest_token_difference=max(differences[1].values()),
        preserved=preserves(sparse_backbone, blocks, noise),
        slots=slots,
        modalities=modality_reports(sparse_backbone, blocks, differences, noise),
    )
    return sparse_model, report


def _check_inputs(backbone, inputs):
    """Raises ValueError unless the inputs fit, with one example at least."""
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
    """Returns the model itself, or the equal of a model of KerasHub."""
    if registry.is_registered(type(getattr(model, "backbone", model))):
        return model
    if not is_convertible(model):
        raise ValueError(
            f"Expected a model with one of {registry.backbone_names()}, or a ViT, CLIP "
            "or SigLIP of KerasHub; received: "
            f"{model if isinstance(model, str) else type(model).__name__}"
        )
    # A pair gives its images' tower.
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
    # Whatever experts a dense model's config names, the copies of an MLP are others.
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
    """Compiles as the dense model was, with an optimizer of its own."""
    # Keras would not compile a task, which has a `compile` of its own, from a config.
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
