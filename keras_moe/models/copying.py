"""Copies of models, which share nothing with them."""

import warnings
from collections.abc import Callable
from typing import Any

import keras


def copied(
    model: Any,
    config: dict,
    without: str | None = None,
    value: Callable[[Any], Any] = keras.ops.convert_to_numpy,
) -> Any:
    """A model of a changed config, with the weights that both have."""
    new = type(model).from_config(config)
    both = [[w for w in each.weights if w.name != without] for each in (model, new)]
    names = [[w.name for w in weights] for weights in both]
    fits = names[0] == names[1]
    for old_weight, new_weight in zip(*both) if fits else ():
        # Through an array: on JAX both variables would share one buffer.
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
        # Its config is without its assets, such as a vocabulary.
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


def config_with_router_options(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A model's config, whose routers have other options."""
    config = model.get_config()
    backbone = config["backbone"]["config"] if "backbone" in config else config
    towers = [backbone]
    if "moe" not in backbone:
        # A pair's towers have routers of their own.
        towers = [x for x in backbone.values() if isinstance(x, dict)]
    towers = [tower for tower in towers if tower.get("moe") is not None]
    if not towers:
        raise ValueError(
            "Expected a model with MoE blocks, whose routers have options; "
            f"received: {type(model).__name__} without"
        )
    for tower in towers:
        tower["moe"] = _with_options(tower["moe"], options)
    return config


def _with_options(moe, options):
    router = moe["router"]
    if isinstance(router, dict):
        arguments = {**router["config"], **options}
        return {**moe, "router": {**router, "config": arguments}}
    before = moe.get("router_options") or {}
    return {**moe, "router_options": {**before, **options}}
