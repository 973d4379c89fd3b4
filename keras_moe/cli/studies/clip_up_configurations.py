"""The configurations of the study of CLIP-UP, as overrides of a recipe."""

import math
from typing import Any

from keras_moe.layers import MoEConfig
from keras_moe.training import Recipe

# The paper's steps, in thousands: dense, and upcycled after them.
DENSE_STEPS, UPCYCLED_STEPS = 440, 350
DENSE_SHARE = DENSE_STEPS / (DENSE_STEPS + UPCYCLED_STEPS)
# Six experts of each modality at least: the threshold of LIMoE's losses in section 3.2.
SOFT_MINIMUM = 6
# Capacity factors as Switch and the paper count them, without K = 2; see `MoEConfig`.
CAPACITIES = {"2.0": 1.0, "4.0": 2.0}
# Experts of one transformer for both modalities, for each of a tower's.
SHARED_FACTOR = 2
TOWERS = ("image", "text")
# The weight of LIMoE's mean of losses.
ENTROPY_WEIGHT = 0.04
# Normalisation of gates, of appendix B.3.
GATES = {
    "as they are": None,
    "normalised before routing": "before",
    "normalised after routing": "after",
}
# A preset of one transformer for both modalities, which gives way in all sizes.
SHARED_PRESET = "clip_up_b32_shared"
# Arguments of both towers, which one transformer has once.
ONE_OF_BOTH = ("hidden_dim", "num_layers", "num_heads", "mlp_dim")

Overrides = dict[str, Any]


def without_experts(backbone: str) -> Overrides:
    """Overrides of the dense twin.

    Args:
        backbone: `"separated"` or `"shared"`.
    """
    if backbone == "shared":
        return {"model.moe_layers": None}
    return {f"model.{tower}.moe_layers": None for tower in TOWERS}


def experts_in(*towers: str) -> Overrides:
    """Overrides that leave experts to some towers alone, of appendix B.1.

    Args:
        *towers: names of the towers with experts.
    """
    others = [tower for tower in TOWERS if tower not in towers]
    return {f"model.{tower}.moe_layers": None for tower in others}


def entropy_losses(backbone: str, own: dict, num_experts: int) -> Overrides:
    """Overrides that add LIMoE's entropy losses, as section 3.2 does.

    They are a local one for text and a global one for each modality, whose mean has
    LIMoE's weight.

    Args:
        backbone: `"separated"` or `"shared"`.
        own: auxiliary losses of CLIP-UP.
        num_experts: number of experts of a router.
    """
    threshold = math.log(min(SOFT_MINIMUM, num_experts))
    if backbone == "shared":
        bag = {"thresholds": dict.fromkeys(TOWERS, threshold), "classic": []}
        return {"model.auxiliary_losses": {**own, "limoe": bag}}
    weight = ENTROPY_WEIGHT / 3
    image = {**own, "global_entropy": {"weight": weight, "threshold": threshold}}
    return {
        "model.image.auxiliary_losses": image,
        "model.text.auxiliary_losses": {**image, "local_entropy": weight},
    }


def capacity_configurations(config: dict) -> dict[str, Overrides]:
    """Overrides by capacity factor as the paper counts it, of appendix B.2.

    Args:
        config: arguments of a `CLIPBackbone` with experts in both towers.
    """
    own = config["image"]["moe"]["capacity_factor"]
    return {
        f"capacity {name}": {} if factor == own else {"model.capacity_factor": factor}
        for name, factor in CAPACITIES.items()
    }


def gate_configurations(config: dict) -> dict[str, Overrides]:
    """Overrides by normalisation of the gates, of appendix B.3.

    Args:
        config: arguments of a `CLIPBackbone` with experts in both towers.
    """
    options = config["image"]["moe"]["router_options"] or {}
    own = options.get("normalize_gates")
    return {
        f"gates {name}": {}
        if value == own
        else {"model.router_options": {**options, "normalize_gates": value}}
        for name, value in GATES.items()
    }


def shared_backbone(config: dict) -> Overrides:
    """Overrides by which one transformer takes the place of two towers.

    It has the sizes of the image tower, and twice the experts of one.

    Args:
        config: arguments of a `CLIPBackbone` with experts in both towers.
    """
    image, text = config["image"], config["text"]
    names = ("image_shape", "patch_size", "activation", *ONE_OF_BOTH)
    own = {
        "preset": SHARED_PRESET,
        **{name: image[name] for name in names},
        **{name: text[name] for name in ("vocabulary_size", "max_length")},
        "projection_dim": config["projection_dim"],
        **MoEConfig.from_dict(image["moe"]).to_dict(),
        "num_experts": SHARED_FACTOR * image["moe"]["num_experts"],
    }
    return {f"model.{name}": value for name, value in own.items()}


def part_of_schedule(recipe: Recipe, share: float) -> Overrides:
    """Overrides that make a run the first part of its length, the warm-up, too.

    Args:
        recipe: the recipe.
        share: share of the length.

    Raises:
        ValueError: if nothing is left for another part.
    """
    name, length = length_of(recipe)
    part = max(1, round(length * share))
    if part >= length:
        raise ValueError(
            "Expected a run of at least two epochs or steps, for a dense part and an "
            f"upcycled one; received: {name}={length}"
        )
    warmup = round(recipe.schedule.warmup_steps * share)
    return {f"schedule.{name}": part, "schedule.warmup_steps": warmup}


def rest_of_schedule(recipe: Recipe, share: float) -> Overrides:
    """Overrides that make a run as long as the first part leaves.

    Args:
        recipe: the recipe.
        share: share of the first part.
    """
    name, length = length_of(recipe)
    first = part_of_schedule(recipe, share)
    warmup = recipe.schedule.warmup_steps - first["schedule.warmup_steps"]
    rest = length - first[f"schedule.{name}"]
    return {f"schedule.{name}": rest, "schedule.warmup_steps": warmup}


def length_of(recipe: Recipe) -> tuple[str, int]:
    """The unit in which a recipe's length is, and the length.

    Args:
        recipe: the recipe.
    """
    name = "epochs" if recipe.schedule.steps is None else "steps"
    return name, getattr(recipe.schedule, name)
