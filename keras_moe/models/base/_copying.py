"""Deep copies of models, optionally with other routers or fewer experts."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_moe._checks import unfit
from keras_moe._compat import flatten_layers
from keras_moe._types import KerasModel
from keras_moe.models.loading._overrides import updated_moe
from keras_moe.routers import TokenChoiceRouter
from keras_moe.routers._pruned import checked_kept, columns_go


def copied(
    model: Any,
    config: dict,
    without: str | None = None,
    value: Callable[[Any], Any] = keras.ops.convert_to_numpy,
) -> Any:
    """Creates a model from a changed config and copies the shared weights."""
    new = type(model).from_config(config)
    old_weights, new_weights = (
        [weight for weight in each.weights if weight.name != without]
        for each in (model, new)
    )
    old, new_names = ([w.name for w in each] for each in (old_weights, new_weights))
    if old != new_names:
        different = sorted({*old} ^ {*new_names}) or "another order"
        raise unfit("arguments that change no weights", weights=different)
    for old_weight, new_weight in zip(old_weights, new_weights):
        # Copy through an array: on JAX both variables would share one buffer.
        new_weight.assign(value(old_weight))
    for old_layer, new_layer in zip(*map(flatten_layers, (model, new))):
        # Vectors of `analysis.steer_expert`, which the config does not include either.
        if getattr(old_layer, "steering", None) is not None:
            new_layer.steering = old_layer.steering
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


def config_with_router_arguments(model: KerasModel, arguments: dict) -> dict[str, Any]:
    config = model.get_config()
    towers = [x for x in _towers(config).values() if x["moe"] is not None]
    if not towers:
        expected = "a model with MoE blocks, whose routers have arguments"
        raise unfit(expected, f"{type(model).__name__} without")
    for tower in towers:
        moe = updated_moe(tower["moe"], arguments)
        tower["moe"] = moe and moe.to_dict()
    return config


_UNPRUNED = {"kept_experts": {}, "removed": False}


def with_kept_experts(
    model: Any, kept_experts: dict[str, Any], method: str, removed: bool
) -> Any:
    config = model.get_config()
    towers = _towers(config)
    layers = _moe_layers(model.backbone, towers)
    if unknown := [name for name in kept_experts if name not in layers]:
        raise ValueError(
            "Expected kept_experts to be a dict from blocks to experts, with blocks "
            f"among {list(layers)}; received: {unknown} of {type(model).__name__}"
        )
    selections = {}
    for prefix, tower in towers.items():
        own = {
            name.removeprefix(prefix): experts
            for name, experts in kept_experts.items()
            if name.startswith(prefix)
        }
        if not own:
            continue
        before = tower["moe"].get("pruning") or _UNPRUNED
        if before["kept_experts"] and (
            before["method"] != method or before["removed"] > removed
        ):
            raise ValueError(
                f"Expected those of a model pruned with method={before['method']!r}, "
                f"removed={before['removed']}; received: method={method!r}, "
                f"removed={removed}"
            )
        kept = {}
        for name in {**own, **before["kept_experts"]}:
            layer = layers[prefix + name]
            columns_are_cut = removed and columns_go(layer.router, method)
            kept[name], columns, rows = _selection(
                layer.router, name, own.get(name), before, columns_are_cut
            )
            if removed:
                for weight in layer.experts.weights:
                    selections[id(weight)] = (0, rows)
            if columns_are_cut:
                # The last axis of the kernel, and of a selection bias, is E.
                selections |= {
                    id(weight): (-1, columns)
                    for weight in layer.router.weights
                    if len(weight.shape)
                }
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
    """Returns the parts of a model's config that have a `moe`, by block name prefix."""
    config = config["backbone"]["config"] if "backbone" in config else config
    if "moe" in config:
        return {"": config}
    # Two towers with separate blocks.
    nested = {name: each for name, each in config.items() if isinstance(each, dict)}
    return {f"{name}/": each for name, each in nested.items() if "moe" in each}


def _moe_layers(backbone, towers):
    layers = {}
    for key in backbone.routing:
        if key.endswith("/token_mixer"):
            continue
        # Modalities that share a block have separate records.
        name = key.rpartition("/")[2] if "" in towers else key
        layers[name] = backbone.get_layer(name).feed_forward
        if not isinstance(layers[name].router, TokenChoiceRouter):
            expected = "token choice routers, whose experts can be pruned"
            raise unfit(expected, f"{type(layers[name].router).__name__} in {name}")
    return layers


def _selection(router, name, experts, before, columns_are_cut):
    """A block's kept experts (original ids), router columns and weight indices."""
    kept_before, num_columns = before["kept_experts"].get(name), router.num_experts
    columns_are_gone = before["removed"] and columns_are_cut
    if experts is None:
        experts = [*range(num_columns)] if columns_are_gone else kept_before
    experts = list(checked_kept(experts, num_columns))
    # Zero-computation experts are the last, and have no rows.
    rows = [expert for expert in experts if expert < router.expert_types.ffn]
    if kept_before is None:
        return experts, experts, rows
    if columns_are_gone:
        return [kept_before[expert] for expert in experts], experts, rows
    if not {*experts} <= {*kept_before}:
        expected = f"experts that the model has kept, among {kept_before}"
        raise unfit(expected, kept_experts=experts)
    if before["removed"]:
        rows = [kept_before.index(expert) for expert in rows]
    return experts, experts, rows
