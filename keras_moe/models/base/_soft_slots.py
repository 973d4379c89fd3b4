"""Keeps the number of slots of soft routers. Axes: N tokens, E experts, C capacity."""

from typing import Any

from keras_moe.layers import MoEBlock, MoEConfig, moe_config
from keras_moe.routers import SoftRouter
from keras_moe.routers.names import split_router

_ZERO_COMPUTATION = ("zero_experts", "copy_experts", "constant_experts")
_SIZES = ("image_shape", "patch_size", "max_length")


def config_for_slots(cls: type, saved: dict, config: dict) -> dict:
    """Keeps saved slots at another image or patch size; refuses other expert types."""
    before, now = moe_config(saved.get("moe")), moe_config(config.get("moe"))
    for name in _ZERO_COMPUTATION:
        expected, received = getattr(before, name, 0), getattr(now, name, 0)
        if received != expected:
            raise ValueError(
                f"Expected {name}={expected!r}, as in the saved weights; received: "
                f"{name}={received!r}. Load with load_weights=False to start anew."
            )
    if not _is_soft(before) or not _is_soft(now):
        return config
    old, new = before.router_arguments, now.router_arguments
    saved, wanted = cls.make_config(saved).to_dict(), cls.make_config(config).to_dict()
    sizes = [name for name in _SIZES if name in saved]
    is_resized = any(_listed(wanted[x]) != _listed(saved[x]) for x in sizes)
    given = [x for x in ("num_selected_experts", "capacity_factor") if new[x] != old[x]]
    if is_resized and new["num_slots"] is None and not given:
        name, arguments = split_router(now.router)
        arguments.pop("capacity_factor", None)
        router = {"name": name, **arguments, "num_slots": _num_slots(cls, saved)}
        config = {**config, "moe": now.replace(router=router).to_dict()}
    return config


def _is_soft(moe: Any) -> bool:
    is_moe = isinstance(moe, MoEConfig) and moe.moe_layers is not None
    return is_moe and issubclass(moe.router_class, SoftRouter)


def _num_slots(cls, config):
    """Returns the slots per expert of a soft router."""
    blocks = cls.unbuilt_blocks(**config)
    soft = next(b for b in blocks if isinstance(b, MoEBlock))
    num_tokens = sum(cls.sequence_lengths(**config))
    return soft.feed_forward.router.group_capacity(num_tokens)


def _listed(size):
    return list(size) if isinstance(size, (list, tuple)) else size
