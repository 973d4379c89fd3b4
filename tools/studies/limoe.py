"""`python -m tools.studies limoe`: the ablations of *LIMoE* on small pairs.

`losses` adds the auxiliary losses one after the other; `selected` has the local losses
and priorities of K > 1 (Table 6); `thresholds` the global entropy thresholds (appendix
B.2, Figures 8 to 10); `orders` who is served first (Figure 6); `routers` one router,
one for each modality, and disjoint experts (Table 7); `experts` the number of experts
(Figure 12); `lengths` the number of patches (Figure 5); `groups` the groups of a batch
(Figure 16); `pruning` prunes the experts of one modality (Figures 13 to 15).
"""

import argparse
import re
from pathlib import Path

from rich.console import Console

from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from tools.studies import limoe_configurations as configurations
from tools.studies import plots
from tools.studies.limoe_configurations import Base, Configurations
from tools.studies.limoe_pruning import Pruning, kept_counts
from tools.studies.pair_parts import (
    Comparison,
    chosen_rows,
    run_comparisons,
)
from tools.studies.pair_training import PairTraining, recipe_of
from tools.studies.study import Study

# Names of rows, with their numbers.
THRESHOLDS, GROUPS, EXPERTS = "text {:g}, image {:g}", "groups: {}", "{} experts"


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for."""
    for option, value, part in (
        ("--selected", args.selected, "selected"),
        ("--text-experts", args.text_experts, "thresholds"),
        ("--image-experts", args.image_experts, "thresholds"),
        ("--text-pool", args.text_pool, "routers"),
    ):
        if value is not None and part not in args.parts:
            raise ValueError(
                f"Expected the part {part} with {option}; received: --parts "
                f"{' '.join(args.parts)}"
            )
    recipe = recipe_of(args)
    base = configurations.base_of(recipe)
    pairs = PairTraining(recipe, args.data_dir)
    study = Study(
        args.output,
        {**pairs.settings(), **backend_and_versions()},
        console,
        args.restart,
    )
    rows = chosen_rows(tables_of(args, base), args.parts, args.only)

    def new_part(name):
        if name == "pruning":
            selected = base.moe.router_arguments["num_selected_experts"]
            counts = kept_counts(base.moe.num_experts, selected)
            return Pruning(study, pairs, rows[name], counts, args.seeds)
        cls, title = PARTS[name]
        runs = {
            row: [pairs.new_run(overrides, seed, row) for seed in range(args.seeds)]
            for row, overrides in rows[name].items()
        }
        return cls(study, name, title, runs)

    return run_comparisons(study, {name: new_part(name) for name in rows})


def tables_of(args: argparse.Namespace, base: Base) -> dict[str, Configurations]:
    """Overrides of the recipe by part and row."""
    texts, images = configurations.soft_minima(base.moe.num_experts)
    thresholds = configurations.threshold_configurations(
        base, args.text_experts or texts, args.image_experts or images
    )
    groups = configurations.group_configurations(base)
    experts = configurations.expert_configurations(base)
    return {
        "losses": configurations.loss_configurations(base),
        "selected": configurations.selected_configurations(
            base, args.selected or (1, 2)
        ),
        "thresholds": {THRESHOLDS.format(*x): row for x, row in thresholds.items()},
        "orders": configurations.order_configurations(base),
        "routers": configurations.router_configurations(base, args.text_pool),
        "experts": {EXPERTS.format(x): row for x, row in experts.items()},
        "lengths": configurations.length_configurations(base),
        "groups": {GROUPS.format(x): row for x, row in groups.items()},
        "pruning": configurations.pruning_configurations(base),
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
PARTS = {
    "losses": (Comparison, "Auxiliary losses"),
    "selected": (Comparison, "Selected experts (Table 6)"),
    "thresholds": (Thresholds, "Global entropy thresholds (Figures 8 to 10)"),
    "orders": (Comparison, "Dispatch orders (Figure 6)"),
    "routers": (Comparison, "Routers (Table 7)"),
    "experts": (Comparison, "Number of experts (Figure 12)"),
    "lengths": (Comparison, "Number of patches (Figure 5)"),
    "groups": (Groups, "Groups of a batch (Figure 16)"),
}
