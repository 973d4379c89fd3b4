"""The configurations of the study of LIMoE, as overrides of a recipe.

Axes: E experts, K selected experts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras_moe import models
from keras_moe.checks import check_pair
from keras_moe.layers import MoEConfig
from keras_moe.losses import LIMOE_LOSSES
from keras_moe.losses.auxiliary import CLASSIC
from keras_moe.models.overrides import complete_config
from keras_moe.training import Recipe

# Overrides by the name of a configuration.
Configurations = dict[str, dict[str, Any]]
# The ways of Table 6 for K > 1: name, local loss (None for none), and priority.
LOCAL_LOSSES = (
    ("no local loss", None, "max_gate"),
    ("local", "local_entropy", "max_gate"),
    ("target", "target_entropy", "max_gate"),
    ("merged", "merged_entropy", "max_gate"),
    ("target, sum", "target_entropy", "sum_gates"),
    ("merged, sum", "merged_entropy", "sum_gates"),
)
# The dispatch orders of Figure 6, and the plain one.
ORDERS = {
    "first come": "first_come",
    "shuffled": "shuffled",
    "images first": [0, 1],
    "texts first": [1, 0],
    "max gate (BPR)": "max_gate",
}
# Arguments of the losses without any of the entropy losses.
WITHOUT_ENTROPY = {"thresholds": {}, "local_modalities": []}
# Figure 12: soft minima of text and of images over E, and numbers of experts over 32.
EXPERTS_TEXT, EXPERTS_IMAGE, EXPERTS = 0.6, 0.2, (1 / 8, 1 / 4, 1 / 2, 1, 2)
# Figure 5: patch sizes over that of B/16, and the soft minimum of text over E; that of
# images is 1.
PATCHES, LENGTHS_TEXT = (3 / 4, 1, 3 / 2, 2, 3, 4), 25 / 32
# Numbers of groups of a batch, of Figure 16.
GROUPS = (1, 2, 4, 8, 16, 32)


class Base(NamedTuple):
    """The LIMoE from which all configurations differ.

    Attributes:
        moe: its mixtures of experts.
        bag: arguments of its auxiliary losses, see `keras_moe.losses.limoe_losses`.
        batch_size: pairs in a step.
        image_size: height and width of the images.
        patch_size: height and width of their patches.
    """

    moe: MoEConfig
    bag: dict
    batch_size: int
    image_size: tuple[int, int]
    patch_size: tuple[int, int]

    def soft_minimum(self, modality: str) -> float:
        """The number of experts whose logarithm is a modality's threshold."""
        return math.exp(self.bag["thresholds"][modality])

    def losses(self, **changes: Any) -> dict:
        """The auxiliary losses with other arguments."""
        return {"limoe": {**self.bag, **changes}}

    def changes(self, configurations: Configurations) -> Configurations:
        """Overrides of a recipe, without those that the base has already.

        Rows that two parts have in common are then one run.
        """
        own = {**self.moe.to_dict(), **self.moe.router_arguments}
        return {
            name: {f"model.{k}": v for k, v in overrides.items() if own[k] != v}
            for name, overrides in configurations.items()
        }


def base_of(recipe: Recipe) -> Base:
    """The LIMoE of a recipe."""
    blueprint = models.resolve(
        recipe.model.preset,
        recipe.model.overrides,
        load_weights=recipe.model.load_weights,
    )
    config = complete_config(blueprint.backbone, blueprint.config)
    moe = config.get("moe")
    if isinstance(moe, dict):
        moe = MoEConfig.from_dict(moe)
    losses = moe.auxiliary_losses if isinstance(moe, MoEConfig) else None
    bag = losses.get("limoe") if isinstance(losses, dict) else None
    if not bag or {*bag.get("thresholds", ())} != {"image", "text"}:
        raise ValueError(
            "Expected a recipe of a LIMoE, whose auxiliary losses have thresholds for "
            f"image and text; received: preset={recipe.model.preset!r}, "
            f"auxiliary_losses={losses!r}"
        )
    sizes = config["image_shape"][:2], check_pair("patch_size", config["patch_size"])
    return Base(moe, bag, recipe.data.batch_size, *map(tuple, sizes))


def loss_configurations(base: Base) -> Configurations:
    """The auxiliary losses, one after the other; the last row is LIMoE's.

    -MI is the negative mutual information of experts and modalities of appendix B.1, in
    the place of the entropies.
    """
    load = ["importance", "load"]
    mutual = [*base.bag.get("classic", CLASSIC), "mutual_information"]
    rows = {
        "none": {},
        "importance, load": base.losses(**WITHOUT_ENTROPY, classic=load),
        "importance, load, z": base.losses(**WITHOUT_ENTROPY),
        "... and -MI": base.losses(**WITHOUT_ENTROPY, classic=mutual),
        "... and local entropy": base.losses(thresholds={}),
        "... and global entropy": base.losses(local_modalities=[]),
        "entropies alone": base.losses(classic=[]),
        "all (LIMoE)": base.losses(),
    }
    return base.changes({k: {"auxiliary_losses": x} for k, x in rows.items()})


def selected_configurations(base: Base, selected: Sequence[int]) -> Configurations:
    """Table 6: numbers of experts per token, local losses and priorities.

    With K = 1 the paper has two rows, without the local loss and with it.
    """
    rows = {}
    for count in selected:
        for name, local, priority in LOCAL_LOSSES[: 2 if count == 1 else None]:
            changes = {"local_modalities": []} if local is None else {}
            if local not in (None, "local_entropy"):
                changes = {"local_loss": local}
            rows[f"K={count}, {name}"] = {
                "num_selected_experts": count,
                "priority": priority,
                "auxiliary_losses": base.losses(**changes),
            }
    return base.changes(rows)


def threshold_configurations(
    base: Base, texts: Sequence[float], images: Sequence[float]
) -> dict[tuple[float, float], dict[str, Any]]:
    """Appendix B.2: overrides by the soft minimum of text and of image experts."""
    for soft_minimum in (*texts, *images):
        if not 1 <= soft_minimum <= base.moe.num_experts:
            raise ValueError(
                f"Expected soft minima from 1 to {base.moe.num_experts}, the number of "
                f"experts; received: {soft_minimum:g}"
            )
    pairs = {f"{t:g} {i:g}": (t, i) for i in images for t in texts}
    changes = base.changes(
        {
            name: {"auxiliary_losses": base.losses(thresholds=thresholds(*pair))}
            for name, pair in pairs.items()
        }
    )
    return {pairs[name]: overrides for name, overrides in changes.items()}


def soft_minima(num_experts: int) -> tuple[list[float], list[float]]:
    """Soft minima of text and of image experts that span those of the paper.

    The paper has 1 to 32 for 32 experts.
    """
    texts = {1.0, *(max(1.0, num_experts * share / 4) for share in (1, 2, 3, 4))}
    return sorted(texts), sorted({1.0, float(num_experts)})


def order_configurations(base: Base) -> Configurations:
    """Figure 6: who is served first."""
    return base.changes({name: {"priority": x} for name, x in ORDERS.items()})


def router_configurations(base: Base, text_pool: int | None = None) -> Configurations:
    """Table 7: one router, one for each modality, and disjoint experts."""
    count = base.moe.num_experts
    if text_pool is None:
        text_pool = min(round(base.soft_minimum("text")) + 1, count - 1)
    if not 1 <= text_pool < count:
        raise ValueError(
            f"Expected 1 to {count - 1} of {count} experts for texts; "
            f"received: {text_pool}"
        )
    pools = [list(range(text_pool, count)), list(range(text_pool))]
    disjoint = f"disjoint ({text_pool} for text, {count - text_pool} for image)"
    return base.changes(
        {
            "joint": {},
            "by modality": {"num_modalities": 2},
            disjoint: {
                "expert_pools": pools,
                "auxiliary_losses": base.losses(
                    **LIMOE_LOSSES["expert_pools"]["limoe"]
                ),
            },
        }
    )


def expert_configurations(base: Base) -> dict[int, dict[str, Any]]:
    """Figure 12: overrides by the number of experts, with thresholds in proportion.

    The paper has 4 to 64 experts around its 32, and soft minima of 0.6 E and 0.2 E;
    thresholds below 0, as its log(0.8), are 0.
    """
    counts = [round(share * base.moe.num_experts) for share in EXPERTS]
    rows = {}
    selected = base.moe.router_arguments["num_selected_experts"]
    for count in counts:
        if count > selected:
            minima = (max(1.0, x * count) for x in (EXPERTS_TEXT, EXPERTS_IMAGE))
            losses = base.losses(thresholds=thresholds(*minima))
            rows[str(count)] = {"num_experts": count, "auxiliary_losses": losses}
    return {int(name): row for name, row in base.changes(rows).items()}


def length_configurations(base: Base) -> Configurations:
    """Figure 5: numbers of image tokens, with the classic losses alone and with all."""
    sizes = {}
    for factor in PATCHES:
        patch = [round(factor * side) for side in base.patch_size]
        length = math.prod(-(-x // y) for x, y in zip(base.image_size, patch))
        if length > 1:
            sizes.setdefault(length, patch)
    text = max(1.0, LENGTHS_TEXT * base.moe.num_experts)
    losses = {
        "classic": base.losses(**WITHOUT_ENTROPY),
        "entropy": base.losses(thresholds=thresholds(text, 1.0)),
    }
    rows = {}
    for name, changes in base.changes(
        {name: {"auxiliary_losses": bag} for name, bag in losses.items()}
    ).items():
        for length, patch in sizes.items():
            own = {} if tuple(patch) == base.patch_size else {"model.patch_size": patch}
            rows[f"{length} patches, {name} losses"] = {**changes, **own}
    return rows


def group_configurations(base: Base) -> dict[int, dict[str, Any]]:
    """Figure 16: overrides by the number of groups of a batch."""
    counts = {n: base.batch_size // n for n in GROUPS if not base.batch_size % n}
    changes = base.changes(
        {str(n): {"examples_per_group": size} for n, size in counts.items()}
    )
    return {n: changes[str(n)] for n in counts}


def pruning_configurations(base: Base) -> Configurations:
    """Appendix E.4: LIMoE, and the same with twice its soft minimum of text.

    The paper has 4 and 9 of 32 experts.
    """
    own, image = base.soft_minimum("text"), base.soft_minimum("image")
    twice = min(2 * own, float(base.moe.num_experts))
    rows = {f"text soft minimum {own:.3g}": base.losses()}
    if twice > own:
        losses = base.losses(thresholds=thresholds(twice, image))
        rows[f"text soft minimum {twice:.3g}"] = losses
    return base.changes({k: {"auxiliary_losses": x} for k, x in rows.items()})


def thresholds(text: float, image: float) -> dict[str, float]:
    """Entropy thresholds of soft minima."""
    return {"text": math.log(text), "image": math.log(image)}
