"""Sparse upcycling: a dense model becomes a mixture of experts of itself.

Axes: E experts, D hidden, H mlp.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_integer,
    check_not_negative,
    check_one_of,
)
from keras_moe.compat import flatten_layers, own_variables
from keras_moe.layers import MuMoEBlock
from keras_moe.layers.activations import entmax15
from keras_moe.layers.expert_coefficients import check_levels, total_experts
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.models import Blueprint, convert, describe, registry
from keras_moe.models.conversion import is_convertible
from keras_moe.models.overrides import apply_overrides
from keras_moe.routers import ROUTERS, SoftRouter, TokenChoiceRouter
from keras_moe.training.factors_of_dense import factors_of_dense
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
    "images_per_group",
    "auxiliary_losses",
    "expert_dropout",
    "dispatcher",
    "zero_experts",
    "copy_experts",
    "constant_experts",
    "tau",
    "gating_residual",
    "seed",
)
# The end of an expert weight's path, and of the dense one it is tiled from.
_TILED = {
    f"moe/experts/{layer}_{kind}": f"mlp/{layer}/{kind}"
    for layer in ("hidden", "output")
    for kind in ("kernel", "bias")
}
# Lists of an optimizer that are not one kind of slot.
_NOT_SLOTS = ("_variables", "_trainable_variables")


class UpcyclingReport(NamedTuple):
    """The result of upcycling.

    Attributes:
        blocks: the names of the blocks that became mixtures of experts.
        dense_parameters: parameters before.
        parameters: parameters after.
        active_parameters: parameters after that one token meets.
        largest_difference: between the outputs before and after, at inference.
        largest_token_difference: the same between the backbone's tokens, which a
            head that is still zero would hide.
        preserved: whether the theory says that the function is the same.
        slots: variables of the optimizer that were carried over.
    """

    blocks: tuple[str, ...]
    dense_parameters: int
    parameters: int
    active_parameters: int
    largest_difference: float
    largest_token_difference: float
    preserved: bool
    slots: int

    def to_dict(self) -> dict:
        """The report as plain data, for JSON."""
        return {**self._asdict(), "blocks": list(self.blocks)}

    def print(self, console: Console | None = None) -> None:
        """Prints the report as a table."""
        table = Table("sparse upcycling", "")
        table.add_row("blocks with experts", ", ".join(self.blocks))
        table.add_row("parameters before", f"{self.dense_parameters:,}")
        table.add_row("parameters after", f"{self.parameters:,}")
        table.add_row("active per token", f"{self.active_parameters:,}")
        table.add_row("largest difference of outputs", f"{self.largest_difference:.2e}")
        tokens = f"{self.largest_token_difference:.2e}"
        table.add_row("largest difference of tokens", tokens)
        theory = "the same" if self.preserved else "not the same"
        table.add_row("the function, in theory", theory)
        table.add_row("optimizer variables carried over", str(self.slots))
        (console or Console()).print(table)


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
    **moe_arguments,
) -> tuple[Any, UpcyclingReport]:
    """Turns a dense model into its mixture of experts.

    Every expert starts as a copy of the dense MLP in its place, routers start fresh,
    and everything else is unchanged. With gates that sum to one and no token dropped
    the copies together do what the MLP did, so that training continues where it was:
    the case of token choice as it is by default here. Expert choice leaves tokens out,
    and soft routing mixes them: the function changes.

    Args:
        dense_model: a `ViTBackbone`, a `MixerBackbone` or an image classifier on one,
            without MoE blocks; or a backbone of KerasHub: `ViTBackbone`, or a
            `CLIPBackbone` or `SigLIPBackbone`, whose vision encoder is taken.
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
            without K), first come first served, no noise,
            and the auxiliary losses load balance (0.01) and z (1e-4). The function is
            then not preserved: a token's K gates sum to less than one. Experts (8) and
            blocks (every other) are the defaults here. Other arguments override it.
        carry_optimizer: give the new model the state of a compiled dense one's
            optimizer, too: iterations, and slots, which are tiled as the weights are.
        images: (B, height, width, channels), at least one, for the report's difference;
            None takes four images of noise.
        noise_seed: seed of `noise`.
        **moe_arguments: further arguments of the backbone that concern its MoE
            layers, such as `num_selected_experts=1`, or `zero_experts=1` for MoE++;
            the backbone's defaults otherwise, whatever the dense model's are.

    Returns:
        `(model, report)`. The dense model is left as it was. The new one is
        compiled alike, and frozen layers stay frozen.

    Raises:
        ValueError: if the model is not dense or unknown, has low-rank pairs or is
            quantised, an argument is out of range, or there is no optimizer to carry
            over.

    Reference:
        *Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints*,
        section 3; *CLIP-UP*, Table 3 and appendix B.3, for its preset.

    Example:

    >>> from keras_moe import models, training
    >>> dense = models.from_preset("vmoe_digits", num_classes=10, moe_layers=None)
    >>> sparse, report = training.upcycle(dense, num_experts=4)
    >>> report.blocks, report.largest_difference < 1e-4
    (('block_1', 'block_3'), True)
    """
    is_mumoe = router == MUMOE
    # One expert is the dense MLP.
    if not is_mumoe:
        check_integer("num_experts", num_experts, minimum=2)
    elif total_experts(check_levels(num_experts)) < 2:
        raise ValueError(
            f"Expected at least two experts; received: num_experts={num_experts}"
        )
    check_not_negative("noise", noise)
    check_one_of("router", router, [*ROUTERS, MUMOE])
    check_argument_names(moe_arguments, MOE_ARGUMENTS, "MoE layers")
    settings = upcycling_settings(preset, router)
    normalizes = settings.pop("normalize_gates", True)
    if normalize_gates is not None:
        normalizes = check_bool("normalize_gates", normalize_gates)
    moe_arguments = {**settings, **moe_arguments}
    original = dense_model
    dense_model = _as_own(original)
    if carry_optimizer and dense_model is not original:
        raise ValueError(
            "Expected a model of this library for carry_optimizer=True; "
            f"received: {type(original).__name__}"
        )
    backbone = getattr(dense_model, "backbone", dense_model)
    if images is None:
        shape = (4, *backbone.image_shape)
        images = np.random.default_rng(0).normal(size=shape).astype("float32")
    shape = tuple(np.shape(images))
    if shape[1:] != backbone.image_shape or not shape[0]:
        raise ValueError(
            f"Expected images (B, {', '.join(map(str, backbone.image_shape))}), at "
            f"least one; received: images.shape={shape}"
        )
    if backbone.routing:
        raise ValueError(
            "Expected a dense model; received: one with mixtures of experts in "
            f"{list(backbone.routing)}"
        )
    for layer in flatten_layers(dense_model):
        if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
            raise ValueError(
                "Expected a model of plain weights (saving merges low-rank pairs); "
                f"received: {layer.path!r} with lora_enabled="
                f"{getattr(layer, 'lora_enabled', False)}, "
                f"quantization_mode={layer.quantization_mode!r}"
            )
    if carry_optimizer and not getattr(dense_model, "optimizer", None):
        raise ValueError(
            "Expected a compiled model for carry_optimizer=True; "
            f"received: {type(dense_model).__name__} without an optimizer"
        )
    options = dict(moe_arguments.pop("router_options", None) or {})
    is_soft = not is_mumoe and issubclass(ROUTERS[router][0], SoftRouter)
    if normalizes and not is_mumoe and not is_soft:
        options.setdefault("normalize_gates", "after")
    sparse_model = _sparse_twin(
        dense_model,
        moe_layers=moe_layers,
        num_experts=num_experts,
        router=router,
        router_options=options,
        **moe_arguments,
    )
    if not getattr(sparse_model, "backbone", sparse_model).routing:
        raise ValueError(
            f"Expected at least one block to upcycle; received: moe_layers={moe_layers}"
        )
    _copy_weights(dense_model, sparse_model, noise, noise_seed)
    _freeze(dense_model, sparse_model)
    if getattr(dense_model, "compiled", False):
        _compile(dense_model, sparse_model)
    slots = 0
    if carry_optimizer and dense_model.optimizer.built:
        sparse_model.optimizer.build(sparse_model.trainable_variables)
        slots = _carry_state(dense_model.optimizer, sparse_model.optimizer)

    sparse_backbone = getattr(sparse_model, "backbone", sparse_model)
    layers = [
        sparse_backbone.get_layer(name).feed_forward for name in sparse_backbone.routing
    ]
    description = describe(sparse_model)
    report = UpcyclingReport(
        blocks=tuple(sparse_backbone.routing),
        dense_parameters=describe(dense_model).parameters,
        parameters=description.parameters,
        active_parameters=description.active_parameters,
        largest_difference=_difference(dense_model, sparse_model, images),
        largest_token_difference=_difference(backbone, sparse_backbone, images),
        preserved=noise == 0 and all(map(_preserves, layers)),
        slots=slots,
    )
    return sparse_model, report


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


def _sparse_twin(dense_model, **moe_arguments):
    """A new model like the dense one, but for its MoE blocks."""
    blueprint = Blueprint.of_model(dense_model)
    # Whatever experts a dense model's config names, the copies of an MLP are others.
    config = {k: v for k, v in blueprint.config.items() if k != "moe"}
    config = apply_overrides(blueprint.backbone, config, moe_arguments)
    return dataclasses.replace(blueprint, config=config).build()


def _copy_weights(dense_model, sparse_model, noise, seed):
    dense = {weight.path: weight for weight in dense_model.weights}
    generator = np.random.default_rng(seed)
    _copy_to_mumoe(dense_model, sparse_model, noise, generator)
    for weight in sparse_model.weights:
        source = dense.get(weight.path)
        if source is not None:
            # A copy: on JAX two models would share, and donate, one buffer.
            weight.assign(keras.ops.convert_to_numpy(source))
            continue
        end = next((end for end in _TILED if weight.path.endswith(end)), None)
        if end is None:
            continue  # The routers' own.
        source = dense[weight.path.removesuffix(end) + _TILED[end]]
        value = keras.ops.convert_to_numpy(source).astype("float32")
        scale = noise * value.std()
        tiled = np.repeat(value[None], weight.shape[0], axis=0)
        if scale:
            tiled += generator.normal(scale=scale, size=tiled.shape).astype("float32")
        weight.assign(tiled)


def _copy_to_mumoe(dense_model, sparse_model, noise, generator):
    dense, sparse = (
        getattr(model, "backbone", model) for model in (dense_model, sparse_model)
    )
    for name in sparse.routing:
        block = sparse.get_layer(name).feed_forward
        if not isinstance(block, MuMoEBlock):
            return
        mlp = dense.get_layer(name).feed_forward
        for layer, experts in (
            (mlp.hidden, block.hidden),
            (mlp.output_dense, block.output_experts),
        ):
            kernel, bias = (
                keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))
                for weight in (layer.kernel, layer.bias)
            )
            values = factors_of_dense(kernel, bias, experts, noise, generator)
            for factor, value in zip(experts.factors, values):
                factor.assign(value)


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


def _difference(dense, sparse, images):
    before, after = (model.predict(images, verbose=0) for model in (dense, sparse))
    return float(np.abs(before.astype("float32") - after.astype("float32")).max())


def _carry_state(dense, sparse):
    """Copies one optimizer's state; returns the number of its variables."""
    carried = 0
    if hasattr(dense, "inner_optimizer"):
        carried += _carry_state(dense.inner_optimizer, sparse.inner_optimizer)
    dense_paths = [weight.path for weight in own_variables(dense, trainable=True)]
    sparse_paths = [weight.path for weight in own_variables(sparse, trainable=True)]
    places = {path: place for place, path in enumerate(dense_paths)}
    for name, slots in vars(dense).items():
        # A kind of slot is a list with one for each trainable variable.
        if isinstance(slots, keras.Variable):
            # Such as the iterations and the scale of a loss.
            getattr(sparse, name).assign(keras.ops.convert_to_numpy(slots))
            carried += 1
            continue
        if name in _NOT_SLOTS or not _is_slots(slots, len(dense_paths)):
            continue
        for path, slot in zip(sparse_paths, getattr(sparse, name)):
            end = next((end for end in _TILED if path.endswith(end)), None)
            if end is not None:
                path = path.removesuffix(end) + _TILED[end]
            if path not in places:
                continue  # A router's.
            value = keras.ops.convert_to_numpy(slots[places[path]])
            if end is not None:
                value = np.broadcast_to(value, slot.shape)
            slot.assign(value)
            carried += 1
    return carried


def _is_slots(value, length):
    is_list = isinstance(value, (list, tuple)) and len(value) == length
    return is_list and all(isinstance(slot, keras.Variable) for slot in value)


def _preserves(layer):
    """Whether equal experts in this layer do what the MLP did."""
    router = layer.router
    if isinstance(layer, MuMoEBlock):
        # Coefficients that sum to one, and room for all of the matrices.
        sums_to_one = router.activation in (entmax15, keras.activations.softmax)
        return sums_to_one and all(
            experts.holds_any_matrix for experts in (layer.hidden, layer.output_experts)
        )
    if not isinstance(router, TokenChoiceRouter) or router.normalize_gates is None:
        return False
    if router.kinds.zero_computation:
        return False
    factor = router.eval_capacity_factor
    if factor is None:
        return router.serves_every_token(False)
    # So large a capacity drops nobody.
    return factor * router.num_selected_experts >= router.num_experts
