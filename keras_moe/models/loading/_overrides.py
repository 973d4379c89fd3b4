"""Overrides: flat names, such as `num_experts=8`, that change a config.

A config is nested: a backbone's has `MoEConfig` fields in `moe` and router arguments in
`moe.router`, and with several towers one config for each. Axes: N tokens, E experts.
"""

from typing import Any

from keras_moe._checks import argument_names, check_argument_names, unfit
from keras_moe.layers import MoEBlock, MoEConfig, MuMoEConfig
from keras_moe.layers.moe_config import MUMOE, moe_config
from keras_moe.models.registry import backbone_class
from keras_moe.models.saving._lora import FROZEN, TRAINING
from keras_moe.routers import ROUTERS, PathwayAwareRouter, Router, SoftRouter
from keras_moe.routers.names import router_class, split_router
from keras_moe.routers.router import router_arguments

# Arguments of every model, and parts of every config.
_MODEL_ARGUMENTS = ("name", "dtype", *TRAINING)
# Those that go to a task instead of its backbone.
_OUTERMOST = ("name", "trainable")
# Fields shared by `MuMoEConfig` and `MoEConfig`.
_OF_EVERY_MIXTURE = ("moe_layers", "num_experts", "expert_mlp_dim", "expert_activation")
# Arguments with the same meaning in every router, kept when the router changes.
_OF_EVERY_ROUTER = (
    "num_selected_experts", "capacity_factor", "evaluation", "eval_capacity_factor",
    "eval_capacity", "dropless", "capacity_rounding", "capacity_multiple_of",
    "priority", "noise_std", "tau", "num_modalities", "expert_pools", "ensemble_size",
)  # fmt: skip
# Mutually exclusive arguments.
_EXCLUSIVE = (
    ("dropless", "capacity", "capacity_factor", "num_slots"),
    ("eval_capacity", "eval_capacity_factor"),
)
# What the weights of routers depend on.
_ZERO_COMPUTATION = ("zero_experts", "copy_experts", "constant_experts")
_SIZES = ("image_shape", "patch_size", "max_length")


def split_overrides(
    backbone_cls: type, task_cls: type | None, overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits overrides into the backbone's and the task's (names of both included)."""
    own = [*_OUTERMOST]
    if task_cls is not None:
        own = [name for name in argument_names(task_cls) if name != "backbone"]
        own += [*_OUTERMOST, "compile"]
    known = [*own, FROZEN, *override_names(backbone_cls)]
    check_argument_names(overrides, known, (task_cls or backbone_cls).__name__)
    if task_cls is None:
        return overrides, {}
    of_task = {name: value for name, value in overrides.items() if name in own}
    return {k: v for k, v in overrides.items() if k not in own}, of_task


def check_config(cls: type, config: dict) -> None:
    """Refuses a source's config with names that are no arguments of its backbone."""
    names = [*override_names(cls), *_MODEL_ARGUMENTS]
    check_argument_names(config, names, cls.__name__)


def apply_overrides(cls: type, config: dict, overrides: dict) -> dict:
    """Returns a backbone's config with flat overrides."""
    towers = tower_families(cls)
    config = nested_config(cls, config)
    if not towers:
        return nested_config(cls, {**config, **overrides})
    own = [*argument_names(cls), *_MODEL_ARGUMENTS]
    with_experts = [name for name in towers if (config.get(name) or {}).get("moe")]
    changed = {name: value for name, value in overrides.items() if name in own}
    for name, family in towers.items():
        names = {*override_names(family)} - {*own}
        if with_experts and name not in with_experts:
            names -= {*moe_names()}
        fitting = {k: v for k, v in overrides.items() if k in names}
        changed[name] = apply_overrides(family, config.get(name) or {}, fitting)
        if name in overrides:
            _check_tower(family, name, overrides[name])
            changed[name] = apply_overrides(family, changed[name], overrides[name])
    return {**config, **changed}


def nested_config(cls: type, config: dict) -> dict:
    """Moves flat `moe` fields of a config into `moe`."""
    if towers := tower_families(cls):
        given = {k: family for k, family in towers.items() if config.get(k) is not None}
        return {
            **config,
            **{k: tower_config(x, k, config[k]) for k, x in given.items()},
        }
    own, of_moe = {*argument_names(cls), *_MODEL_ARGUMENTS}, moe_names()
    fields = {k: v for k, v in config.items() if k not in own and k in of_moe}
    if not fields:
        return dict(config)
    config = {k: v for k, v in config.items() if k not in fields}
    moe = updated_moe(config.get("moe"), fields)
    return {**config, "moe": moe and moe.to_dict()}


def tower_config(cls: type, name: str, config: Any) -> dict:
    """Returns the nested config of the tower `name`, checked."""
    _check_tower(cls, name, config)
    return nested_config(cls, config)


def _check_tower(cls, name, config):
    if not isinstance(config, dict):
        expected = f"{name} to be a dict of the arguments of {cls.__name__}"
        raise unfit(expected, f"{name}={config!r}")
    names = [x for x in override_names(cls) if x not in _MODEL_ARGUMENTS]
    check_argument_names(config, names, cls.__name__)


def updated_moe(moe: Any, changes: dict) -> MoEConfig | MuMoEConfig | None:
    """Updates an MoE config with flat names of its fields and its router."""
    before = moe_config(moe) or MoEConfig(moe_layers=None)
    fields, router = before.to_dict(), changes.get("router")
    if router is None and "router" in changes:
        expected = "router to be a name, a dict of a name and arguments, or a Router"
        raise unfit(expected, "router=None")
    is_mumoe = (before.router if router is None else router) == MUMOE
    if is_mumoe != isinstance(before, MuMoEConfig):
        fields = {name: fields[name] for name in _OF_EVERY_MIXTURE}
    if is_mumoe:
        changed = MuMoEConfig.from_dict({**fields, **changes})
    else:
        if isinstance(before, MuMoEConfig):
            before = MoEConfig()
        names = MoEConfig.field_names()
        fields |= {name: value for name, value in changes.items() if name in names}
        of_router = {name: x for name, x in changes.items() if name not in names}
        changed = _with_router(before, fields, router, of_router)
    return None if changed == MoEConfig(moe_layers=None) else changed


def _with_router(before, fields, router, arguments):
    """Creates a `MoEConfig`; a `router` of None keeps the previous one."""
    old_name, kept = split_router(before.router)
    # Expert types also determine the router class.
    changed = MoEConfig.from_dict({**fields, "router": router or old_name})
    name, own = split_router(changed.router)
    if isinstance(router, (dict, Router)):
        kept = {}
    elif name != old_name:
        selected = before.router_arguments.get("num_selected_experts")
        kept = {"num_selected_experts": selected, **kept}
        _, named = router_class(name)
        shared = {*_OF_EVERY_ROUTER} - {*named}
        kept = {k: v for k, v in kept.items() if k in shared}
    known = changed.router_arguments
    kept = {k: v for k, v in kept.items() if k in known and k not in arguments}
    for group in _EXCLUSIVE:
        if any(arguments.get(name) for name in group):
            kept = {k: v for k, v in kept.items() if k not in group}
    # None restores the default of the router's class.
    given = {k: v for k, v in arguments.items() if v is not None or k not in known}
    return changed.replace(router={"name": name, **kept, **own, **given})


def config_for_weights(cls: type, saved: dict, config: dict) -> dict:
    """Adapts a config to saved weights: soft routers keep their slots."""
    saved = nested_config(cls, saved)
    if towers := tower_families(cls):
        changed = {
            name: config_for_weights(family, saved[name], config[name])
            for name, family in towers.items()
        }
        return {**config, **changed}
    before, now = moe_config(saved.get("moe")), moe_config(config.get("moe"))
    for name in _ZERO_COMPUTATION:
        expected, received = getattr(before, name, 0), getattr(now, name, 0)
        if received != expected:
            raise ValueError(
                f"Expected {name}={expected!r}, as in the saved weights; received: "
                f"{name}={received!r}. Load with load_weights=False to start anew."
            )
    if not (isinstance(before, MoEConfig) and isinstance(now, MoEConfig)):
        return config
    if not (_is_soft(before) and _is_soft(now)):
        return config
    old, new = before.router_arguments, now.router_arguments
    saved, wanted = (cls.make_config(x) for x in (saved, config))
    sizes = [[_listed(getattr(x, n, None)) for n in _SIZES] for x in (saved, wanted)]
    given = [x for x in ("num_selected_experts", "capacity_factor") if new[x] != old[x]]
    if sizes[0] == sizes[1] or new["num_slots"] is not None or given:
        return config
    blocks = cls.tower(saved, "float32").blocks
    block = next(block for block in blocks if isinstance(block, MoEBlock))
    num_tokens = sum(cls.sequence_lengths(saved))
    num_slots = block.feed_forward.router.group_capacity(num_tokens)
    name, arguments = split_router(now.router)
    arguments.pop("capacity_factor", None)
    router = {"name": name, **arguments, "num_slots": num_slots}
    return {**config, "moe": now.replace(router=router).to_dict()}


def _is_soft(moe):
    return moe.moe_layers is not None and issubclass(moe.router_class, SoftRouter)


def _listed(size):
    return list(size) if isinstance(size, (list, tuple)) else size


def check_constructor_arguments(cls: type, kwargs: dict[str, Any]) -> None:
    """Refuses unknown or misplaced arguments of a backbone's constructor."""
    own, towers = argument_names(cls), tower_families(cls)
    for name, value in kwargs.items():
        if name in override_names(cls) and name not in own:
            example = "moe={...} or its router"
            if towers:
                example = f"the config of a tower, such as {next(iter(towers))}={{...}}"
            raise unfit(f"{name} in {example}", f"{cls.__name__}({name}={value!r})")
    check_argument_names(kwargs, [*_OUTERMOST], cls.__name__, own)


def tower_families(cls: type) -> dict[str, type]:
    """Returns the backbone class of each tower argument, if there are towers."""
    towers = getattr(cls, "towers", {})
    return {name: backbone_class(family) for name, family in towers.items()}


def override_names(cls: type) -> list[str]:
    """Returns the flat names that a backbone accepts as overrides."""
    towers = tower_families(cls)
    names = [*argument_names(cls), *([] if towers else moe_names())]
    for family in towers.values():
        names += override_names(family)
    return list(dict.fromkeys(names))


def moe_names() -> list[str]:
    """Returns the flat names of MoE fields and of all registered routers' arguments."""
    names = [*MoEConfig.field_names(), *MuMoEConfig.field_names()]
    for cls in (PathwayAwareRouter, *(cls for cls, _ in ROUTERS.values())):
        names += router_arguments(cls)
    return list(dict.fromkeys(name for name in names if name != "seed"))
