"""Copies of models in which some experts serve nobody, or are gone.

Axes: E experts, D hidden, M modalities.
"""

from typing import Any

from keras import ops

from keras_moe.checks import check_bool, check_one_of
from keras_moe.models.copying import copied
from keras_moe.routers import TokenChoiceRouter
from keras_moe.routers.pruned import METHODS, checked_kept


def with_kept_experts(
    model: Any, kept_experts: dict[str, Any], method: str, removed: bool
) -> Any:
    """A copy of a model whose MoE blocks keep some of their experts.

    Args:
        model: a backbone, or a task around one.
        kept_experts: numbers of the experts to keep by the block's name, as the routing
            record has them; the other blocks stay as they are.
        method: argument of `keras_moe.routers.pruned.PrunedTokenChoiceRouter`.
        removed: whether the other experts are removed; else they have their weights,
            and serve nobody.

    Raises:
        ValueError: if there is no such block or expert, fewer than K are left, the
            routers are not of token choice, or the model is pruned otherwise.
    """
    config = model.get_config()
    backbone_config = config["backbone"]["config"] if "backbone" in config else config
    moe = backbone_config.get("moe")
    if moe is None or moe["router"] == "mumoe":
        raise ValueError(
            "Expected a model with MoE blocks whose tokens choose experts; received: "
            f"{type(model).__name__} with router={moe and moe['router']!r}"
        )
    if not isinstance(kept_experts, dict) or not kept_experts:
        raise ValueError(
            "Expected kept_experts to be a dict from blocks to experts; "
            f"received: kept_experts={kept_experts!r}"
        )
    before = moe.get("pruning") or {"kept_experts": {}, "removed": False}
    _check_like(before, method, removed)
    check_one_of("method", method, METHODS)
    check_bool("removed", removed)
    backbone = getattr(model, "backbone", model)
    kept, selections = {}, {}
    for name in {**before["kept_experts"], **kept_experts}:
        layer = _moe_layer(backbone, name)
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
    backbone_config["moe"] = {
        **moe,
        "pruning": {"method": method, "kept_experts": kept, "removed": removed},
    }

    def value(weight):
        array = ops.convert_to_numpy(weight)
        if id(weight) not in selections:
            return array
        axis, numbers = selections[id(weight)]
        return array.take(numbers, axis=axis)

    return copied(model, config, value=value)


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


def _moe_layer(backbone, name):
    # Backbones of two modalities have the modality before the block's name.
    names = dict.fromkeys(key.rpartition("/")[2] for key in backbone.routing)
    names = [name for name in names if name.startswith("block_")]
    if name not in names:
        raise ValueError(
            f"Expected the names of MoE blocks, among {names}; received: {name!r}"
        )
    layer = backbone.get_layer(name).feed_forward
    if not isinstance(layer.router, TokenChoiceRouter):
        raise ValueError(
            "Expected token choice routers, whose experts can be pruned; "
            f"received: {type(layer.router).__name__}"
        )
    return layer


def _selection(num_columns, experts, kept_before, removed_before, method):
    """The kept experts, their columns in the router, and their places in the weights.

    The first are numbers among the experts before any pruning.
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
