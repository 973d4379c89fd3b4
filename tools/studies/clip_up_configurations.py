"""The configurations of the study of CLIP-UP, as overrides of a recipe."""

import math
from typing import Any, NamedTuple

from keras_moe.layers import MoEConfig
from keras_moe.training import Recipe

# The paper's steps, in thousands: dense, of those with the upcycled ones after them.
DENSE_SHARE = 440 / (440 + 350)
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
    """Overrides of the dense twin."""
    if backbone == "shared":
        return {"model.moe_layers": None}
    return {f"model.{tower}.moe_layers": None for tower in TOWERS}


def experts_in(*towers: str) -> Overrides:
    """Overrides that leave experts to some towers alone, of appendix B.1."""
    others = [tower for tower in TOWERS if tower not in towers]
    return {f"model.{tower}.moe_layers": None for tower in others}


def entropy_losses(backbone: str, own: dict, num_experts: int) -> Overrides:
    """Overrides that add LIMoE's entropy losses, as section 3.2 does.

    They are a local one for text and a global one for each modality, whose mean has
    LIMoE's weight.
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


def router_arguments(tower: dict) -> dict:
    """The arguments of the routers of a tower's config."""
    return MoEConfig.from_dict(tower["moe"]).router_arguments


def capacity_configurations(config: dict) -> dict[str, Overrides]:
    """Overrides by capacity factor as the paper counts it, of appendix B.2."""
    own = router_arguments(config["image"])["capacity_factor"]
    return {
        f"capacity {name}": {} if factor == own else {"model.capacity_factor": factor}
        for name, factor in CAPACITIES.items()
    }


def gate_configurations(config: dict) -> dict[str, Overrides]:
    """Overrides by normalisation of the gates, of appendix B.3."""
    own = router_arguments(config["image"])["normalize_gates"]
    return {
        f"gates {name}": {} if value == own else {"model.normalize_gates": value}
        for name, value in GATES.items()
    }


def shared_backbone(config: dict) -> Overrides:
    """Overrides by which one transformer takes the place of two towers.

    It has the sizes of the image tower, and twice the experts of one.
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


class Lengths(NamedTuple):
    """Overrides that are schedules of a recipe of upcycled models.

    Attributes:
        dense: a dense model's before it is upcycled.
        upcycled: an upcycled model's, after that.
        whole: the schedule of a model as long as both, dense or from scratch.
    """

    dense: Overrides
    upcycled: Overrides
    whole: Overrides


def lengths(dense: Recipe, upcycled: Recipe, total: int | None = None) -> Lengths:
    """The schedules of dense models, upcycled ones, and those to compare.

    Dense models and those from scratch have the learning rates and the optimizer of
    the dense recipe, as in the paper. Warm-ups shrink with their runs.
    """
    unit = "epochs" if upcycled.schedule.steps is None else "steps"
    both = [getattr(x.schedule, unit) for x in (dense, upcycled)]
    if total is None and both[0] is None:
        raise ValueError(
            f"Expected two recipes whose length is in {unit}; received: "
            f"{dense.name} and {upcycled.name}"
        )
    first, second = both
    if total is not None:
        first = round(total * DENSE_SHARE)
        second = total - first
        if not first or not second:
            raise ValueError(
                f"Expected at least two {unit}, for a dense model and an upcycled "
                f"one; received: {total}"
            )
    own = {
        f"{section}.{name}": value
        for section in ("optimizer", "schedule")
        for name, value in getattr(dense, section).to_dict().items()
        if name not in ("epochs", "steps", "warmup_steps")
    }

    def schedule(length, recipe):
        # Recipes with another unit have a warm-up of a tenth at most.
        before = getattr(recipe.schedule, unit) or 10 * recipe.schedule.warmup_steps
        share = min(1.0, length / before) if before else 1.0
        warmup = round(recipe.schedule.warmup_steps * share)
        if unit == "steps":
            warmup = min(warmup, length // 10)
        return {f"schedule.{unit}": length, "schedule.warmup_steps": warmup}

    return Lengths(
        {**own, **schedule(first, dense)},
        schedule(second, upcycled),
        {**own, **schedule(first + second, dense)},
    )
