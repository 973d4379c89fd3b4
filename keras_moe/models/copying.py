"""Copies of models, which share nothing with them."""

import warnings
from typing import Any

import keras


def copied(model: Any, config: dict, without: str | None = None) -> Any:
    """A model of a changed config, with the weights that both have.

    Args:
        model: a backbone or a task.
        config: its config, changed.
        without: name of weights that may be new or change their shape.
    """
    new = type(model).from_config(config)
    both = [[w for w in each.weights if w.name != without] for each in (model, new)]
    shapes = [[(w.name, tuple(w.shape)) for w in weights] for weights in both]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "Expected a model that its config makes again; received weights beside "
            "it, such as low-rank pairs: save_to_preset and load it first"
        )
    for old_weight, new_weight in zip(*both):
        # Through an array: on JAX both variables would share one buffer.
        new_weight.assign(keras.ops.convert_to_numpy(old_weight))
        new_weight.trainable = old_weight.trainable
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
    """A model's config, whose routers have other options.

    Args:
        model: a backbone or a task.
        options: arguments of the router's class, beside or instead of those in
            `router_options`.

    Raises:
        ValueError: if the model has no MoE blocks.
    """
    config = model.get_config()
    backbone = config["backbone"]["config"] if "backbone" in config else config
    moe = backbone["moe"]
    if moe is None:
        raise ValueError(
            "Expected a model with MoE blocks, whose routers have options; "
            f"received: {type(model).__name__} without"
        )
    router = moe["router"]
    if isinstance(router, dict):
        arguments = {**router["config"], **options}
        moe = {**moe, "router": {**router, "config": arguments}}
    else:
        before = moe.get("router_options") or {}
        moe = {**moe, "router_options": {**before, **options}}
    backbone["moe"] = moe
    return config
