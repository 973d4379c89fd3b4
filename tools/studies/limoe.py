"""Repeat the ablations of LIMoE on small pairs of images and captions.

losses adds the auxiliary losses one after the other, from none to LIMoE's. selected has
the local losses and priorities for several experts per token (Table 6). thresholds
varies the global entropy thresholds (appendix B.2, Figures 8 to 10), orders who is
served first (Figure 6), routers compares one router, one for each modality, and
disjoint experts (Table 7), experts the number of experts (Figure 12), lengths the
number of patches (Figure 5), groups the groups of a batch (Figure 16). pruning prunes
the experts of one modality (Figures 13 to 15).

Axes: E experts, K selected experts.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from keras_moe import models
from keras_moe._checks import check_pair
from keras_moe.cli._arguments import RESUMES, Result, add_count
from keras_moe.layers import MoEConfig
from keras_moe.losses import LIMOE_LOSSES
from keras_moe.losses.auxiliary import CLASSIC
from keras_moe.training import Recipe
from tools.studies import plots
from tools.studies.limoe_pruning import Pruning, kept_counts
from tools.studies.pairs import (
    Comparison,
    PairTraining,
    add_pairs,
    chosen_rows,
    new_study,
    recipe_of,
    run_comparisons,
)
from tools.studies.study import add_numbers, add_parts, check_parts

EXAMPLES = """\
python -m tools.studies limoe --parts losses orders
python -m tools.studies limoe --parts pruning --seeds 5
python -m tools.studies limoe --data folder:pairs --steps 500 --parts routers"""
INTERRUPTED = RESUMES
PARTS = (
    "losses",
    "selected",
    "thresholds",
    "orders",
    "routers",
    "experts",
    "lengths",
    "groups",
    "pruning",
)
# Names of rows, with their numbers.
THRESHOLD_ROW, GROUP_ROW = "text {:g}, image {:g}", "groups: {}"
EXPERT_ROW = "{} experts"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    what = "The experts per token of the part selected; by default 1 2."
    add_count(parser, "--selected", what, nargs="+")
    for modality in ("text", "image"):
        what = f"The soft minima of {modality} experts of the part thresholds; by "
        what += "default from 1 to all experts."
        add_numbers(parser, f"--{modality}-experts", "N", what)
    add_count(
        parser,
        "--text-pool",
        "The disjoint experts of text of the part routers; by default one more "
        "than the soft minimum of text.",
    )
    add_pairs(parser, "limoe", "limoe_emoji")


def run(args: argparse.Namespace, console: Console) -> Result:
    check_parts(
        args,
        selected="selected",
        text_experts="thresholds",
        image_experts="thresholds",
        text_pool="routers",
    )
    recipe = recipe_of(args)
    base = base_of(recipe)
    pairs = PairTraining(recipe, args.data_dir)
    study = new_study(args, pairs, console)
    rows = chosen_rows(tables_of(args, base), args.parts, args.only)

    def new_part(name):
        if name == "pruning":
            selected = base.moe.router_arguments["num_selected_experts"]
            counts = kept_counts(base.moe.num_experts, selected)
            return Pruning(study, pairs, rows[name], counts, args.seeds)
        cls, title = COMPARISONS[name]
        runs = {
            row: [pairs.new_run(overrides, seed, row) for seed in range(args.seeds)]
            for row, overrides in rows[name].items()
        }
        return cls(study, name, title, runs)

    return run_comparisons(study, {name: new_part(name) for name in rows})


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
    config = blueprint.backbone.make_config(blueprint.config).to_dict()
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
    for count in counts:
        if count > base.moe.router_arguments["num_selected_experts"]:
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


def tables_of(args: argparse.Namespace, base: Base) -> dict[str, Configurations]:
    """Overrides of the recipe by part and row."""
    texts, images = soft_minima(base.moe.num_experts)
    thresholds = threshold_configurations(
        base, args.text_experts or texts, args.image_experts or images
    )
    groups = group_configurations(base)
    experts = expert_configurations(base)
    return {
        "losses": loss_configurations(base),
        "selected": selected_configurations(base, args.selected or (1, 2)),
        "thresholds": {THRESHOLD_ROW.format(*x): row for x, row in thresholds.items()},
        "orders": order_configurations(base),
        "routers": router_configurations(base, args.text_pool),
        "experts": {EXPERT_ROW.format(x): row for x, row in experts.items()},
        "lengths": length_configurations(base),
        "groups": {GROUP_ROW.format(x): row for x, row in groups.items()},
        "pruning": pruning_configurations(base),
    }


class Thresholds(Comparison):
    """Figures 8 to 10."""

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = []
        for name, row in every[self.name]["rows"].items():
            text, image = numbers_in(name)
            rows.append({"text": text, "image": image, "figures": row["figures"]})
        plots.plot_entropy_thresholds(rows, path)
        return [path]


class Groups(Comparison):
    """Figure 16."""

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = {
            int(*numbers_in(name)): {
                "r1": row["figures"]["r1"],
                "seconds": row["epoch_seconds"],
            }
            for name, row in every[self.name]["rows"].items()
        }
        plots.plot_group_sizes(rows, path)
        return [path]


def numbers_in(name: str) -> list[float]:
    """The numbers in the name of a row."""
    return [float(number) for number in re.findall(r"[\d.]+", name)]


# The class and the title of each part but the last.
COMPARISONS = {
    "losses": (Comparison, "Auxiliary losses"),
    "selected": (Comparison, "Selected experts (Table 6)"),
    "thresholds": (Thresholds, "Global entropy thresholds (Figures 8 to 10)"),
    "orders": (Comparison, "Dispatch orders (Figure 6)"),
    "routers": (Comparison, "Routers (Table 7)"),
    "experts": (Comparison, "Number of experts (Figure 12)"),
    "lengths": (Comparison, "Number of patches (Figure 5)"),
    "groups": (Groups, "Groups of a batch (Figure 16)"),
}
