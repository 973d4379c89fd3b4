"""Deep copies of models, optionally with other routers or fewer experts."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool, check_one_of
from keras_moe.models.overrides import updated_moe
from keras_moe.routers import TokenChoiceRouter
from keras_moe.routers.pruned import METHODS, checked_kept


def copied(
    model: Any,
    config: dict,
    without: str | None = None,
    value: Callable[[Any], Any] = keras.ops.convert_to_numpy,
) -> Any:
    """Creates a model from a changed config and copies the shared weights."""
    new = type(model).from_config(config)
    both = [[w for w in each.weights if w.name != without] for each in (model, new)]
    names = [[w.name for w in weights] for weights in both]
    fits = names[0] == names[1]
    for old_weight, new_weight in zip(*both) if fits else ():
        # Copy through an array: on JAX both variables would share one buffer.
        array = value(old_weight)
        fits = fits and tuple(array.shape) == tuple(new_weight.shape)
        if not fits:
            break
        new_weight.assign(array)
        new_weight.trainable = old_weight.trainable
    if not fits:
        raise ValueError(
            "Expected a model that its config makes again; received weights beside "
            "it, such as low-rank pairs: save_to_preset and load it first"
        )
    preprocessor = getattr(model, "preprocessor", None)
    if hasattr(preprocessor, "load_preset_assets"):
        # The config does not include assets such as a vocabulary.
        new.preprocessor = preprocessor
    if getattr(model, "compiled", False):
        try:
            new.compile_from_config(model.get_compile_config())
        except (TypeError, ValueError) as error:
            warnings.warn(
                "The copy is compiled with defaults: the model's own settings cannot "
                f"be read back ({error})",
                stacklevel=3,
            )
    return new


def config_with_router_arguments(model: Any, arguments: dict) -> dict[str, Any]:
    config = model.get_config()
    towers = _towers(config["backbone"]["config"] if "backbone" in config else config)
    towers = [tower for tower in towers.values() if tower["moe"] is not None]
    if not towers:
        raise ValueError(
            "Expected a model with MoE blocks, whose routers have arguments; "
            f"received: {type(model).__name__} without"
        )
    for tower in towers:
        tower["moe"] = updated_moe(tower["moe"], arguments).to_dict()
    return config


_UNPRUNED = {"kept_experts": {}, "removed": False}


def with_kept_experts(
    model: Any, kept_experts: dict[str, Any], method: str, removed: bool
) -> Any:
    """Returns a copy with some experts pruned."""
    check_one_of("method", method, METHODS)
    check_bool("removed", removed)
    if not isinstance(kept_experts, dict) or not kept_experts:
        raise ValueError(
            "Expected kept_experts to be a dict from blocks to experts; "
            f"received: kept_experts={kept_experts!r}"
        )
    config = model.get_config()
    towers = _towers(config["backbone"]["config"] if "backbone" in config else config)
    backbone = getattr(model, "backbone", model)
    layers = _moe_layers(backbone, towers)
    for name in kept_experts:
        if name not in layers:
            raise ValueError(
                "Expected the names of MoE blocks whose tokens choose experts, among "
                f"{list(layers)}; received: {name!r} of {type(model).__name__}"
            )
    selections = {}
    for prefix, tower in towers.items():
        own = {
            name.removeprefix(prefix): experts
            for name, experts in kept_experts.items()
            if name.startswith(prefix)
        }
        if own:
            before = tower["moe"].get("pruning") or _UNPRUNED
            _check_like(before, method, removed)
            blocks = {name: layers[prefix + name] for name in own}
            kept = before["kept_experts"]
            blocks.update({name: layers[prefix + name] for name in kept})
            kept, smaller = _selections(blocks, own, before, method, removed)
            selections.update(smaller)
            pruning = {"method": method, "kept_experts": kept, "removed": removed}
            tower["moe"] = {**tower["moe"], "pruning": pruning}

    def value(weight):
        array = ops.convert_to_numpy(weight)
        if id(weight) not in selections:
            return array
        axis, numbers = selections[id(weight)]
        return array.take(numbers, axis=axis)

    return copied(model, config, value=value)


def _towers(config):
    """Returns the configs that have a `moe`, by block name prefix."""
    if "moe" in config:
        return {"": config}
    # Two towers with separate blocks.
    nested = {name: each for name, each in config.items() if isinstance(each, dict)}
    return {f"{name}/": each for name, each in nested.items() if "moe" in each}


def _moe_layers(backbone, towers):
    """Returns the MoE layers with prunable experts, by block name."""
    layers = {}
    for key in backbone.routing:
        if key.endswith("/token_mixer"):
            continue
        # Modalities that share a block have separate records.
        name = key.rpartition("/")[2] if "" in towers else key
        layers[name] = backbone.get_layer(name).feed_forward
        if not isinstance(layers[name].router, TokenChoiceRouter):
            raise ValueError(
                "Expected token choice routers, whose experts can be pruned; "
                f"received: {type(layers[name].router).__name__} in {name}"
            )
    return layers


def _selections(blocks, kept_experts, before, method, removed):
    """Returns the kept experts of each block, and how to select their weights."""
    kept, selections = {}, {}
    for name, layer in blocks.items():
        kept[name], columns, places = _selection(
            layer.router.num_experts,
            kept_experts.get(name),
            before["kept_experts"].get(name),
            before["removed"],
            method,
        )
        if removed:
            weights = layer.experts.weights
            selections.update({id(weight): (0, places) for weight in weights})
        if removed and method == "router_drop":
            selections[id(layer.router.kernel)] = (-1, columns)
    return kept, selections


def _check_like(before, method, removed):
    if before["kept_experts"] and before["method"] != method:
        raise ValueError(
            f"Expected method={before['method']!r}, by which the model is pruned "
            f"already; received: method={method!r}"
        )
    if before["removed"] and not removed:
        raise ValueError(
            "Expected a model that has all its experts, since they are to keep their "
            "weights; received: one whose pruned experts are removed"
        )


def _selection(num_columns, experts, kept_before, removed_before, method):
    """Returns kept experts, their router columns and their weight indices.

    Kept experts are numbered as before any pruning.
    """
    columns_are_gone = removed_before and method == "router_drop"
    if experts is None:
        experts = kept_before
        if columns_are_gone:
            experts = list(range(num_columns))
    experts = checked_kept(experts, num_columns)
    if kept_before is None:
        return list(experts), experts, experts
    if columns_are_gone:
        return [kept_before[expert] for expert in experts], experts, experts
    if not {*experts} <= {*kept_before}:
        raise ValueError(
            f"Expected experts that the model has kept, among {kept_before}; "
            f"received: kept_experts={list(experts)}"
        )
    places = experts
    if removed_before:
        places = [kept_before.index(expert) for expert in experts]
    return list(experts), experts, places
