"""Keeps the number of slots of soft routers, whose slots are weights.

Axes: N tokens, E experts, C capacity.
"""

from typing import Any

from keras_moe.layers import MoEConfig, MoEEncoderBlock, moe_config
from keras_moe.routers import SoftRouter
from keras_moe.routers.names import split_router

_ZERO_COMPUTATION = ("zero_experts", "copy_experts", "constant_experts")
_SIZES = ("image_shape", "patch_size", "max_length")


def config_for_slots(cls: type, saved: dict, config: dict) -> dict:
    """Returns a config whose soft routers fit the weights of another config."""
    before, now = moe_config(saved.get("moe")), moe_config(config.get("moe"))
    for name in _ZERO_COMPUTATION:
        expected = getattr(before, name, 0)
        if getattr(now, name, 0) != expected:
            raise ValueError(
                f"Expected {name}={expected!r}, as in the saved weights; received: "
                f"{name}={getattr(now, name, 0)!r}. Load with load_weights=False to "
                "start anew."
            )
    if before is None or before.moe_layers is None:
        return config
    if _is_soft(before) is None or _is_soft(now) is None:
        return config
    if _is_soft(before) != _is_soft(now):
        raise ValueError(
            f"Expected a router with the weights of router={before.router!r}; "
            f"received: router={now.router!r}, whose weights are others. Load with "
            "load_weights=False to start anew."
        )
    if not _is_soft(now):
        return config
    saved = cls.make_config(saved).to_dict()
    sizes = {name: saved[name] for name in _SIZES if name in saved}
    expected = _num_slots(cls, saved)
    received = _num_slots(cls, cls.make_config({**config, **sizes}).to_dict())
    if received not in (expected, None):
        old = {"num_experts": before.num_experts, **before.router_arguments}
        new = {"num_experts": now.num_experts, **now.router_arguments}
        changed = [
            f"{name}={new[name]!r}" for name in new if new[name] != old.get(name)
        ]
        raise ValueError(
            f"Expected arguments that keep the {expected} slots of each expert, which "
            f"are weights of a soft router; received: {', '.join(changed)}, which make "
            f"{received}. Load with load_weights=False to start anew."
        )
    complete = cls.make_config(config).to_dict()
    is_resized = any(_sizes(complete[name]) != _sizes(saved[name]) for name in sizes)
    name, arguments = split_router(now.router)
    if arguments.get("num_slots") is None and is_resized:
        arguments.pop("capacity_factor", None)
        router = {"name": name, **arguments, "num_slots": expected}
        config = {**config, "moe": now.replace(router=router).to_dict()}
    return config


def _is_soft(moe: Any) -> bool | None:
    """Whether a config's routers are soft; None if there are no slots to compare."""
    if not isinstance(moe, MoEConfig):
        return None
    return issubclass(moe.router_class, SoftRouter)


def _num_slots(cls, config):
    """Returns the slots per expert of a soft router, or None without MoE blocks."""
    blocks = cls.unbuilt_blocks(**config)
    soft = next((b for b in blocks if isinstance(b, MoEEncoderBlock)), None)
    if soft is None:
        return None
    num_tokens = sum(cls.sequence_lengths(**config))
    return soft.feed_forward.router.group_capacity(num_tokens)


def _sizes(size):
    return list(size) if isinstance(size, (list, tuple)) else size
