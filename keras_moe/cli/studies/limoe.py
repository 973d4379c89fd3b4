"""`keras-moe study limoe`: the ablations of *LIMoE* on small pairs.

`losses` adds the auxiliary losses one after the other; `selected` has the local losses
and priorities of K > 1 (Table 6); `thresholds` the global entropy thresholds (appendix
B.2, Figures 8 to 10); `orders` who is served first (Figure 6); `routers` one router,
one for each modality, and disjoint experts (Table 7); `groups` the groups of a batch
(Figure 16); `pruning` prunes the experts of one modality (Figures 13 to 15).
"""

import argparse
from pathlib import Path

from rich.console import Console

from keras_moe.analysis import plots
from keras_moe.cli.result import Result
from keras_moe.cli.studies import limoe_configurations as configurations
from keras_moe.cli.studies.limoe_pruning import Pruning, kept_counts
from keras_moe.cli.studies.pair_parts import Comparison
from keras_moe.cli.studies.pair_training import PairTraining, recipe_of
from keras_moe.cli.studies.study import Study, run_parts
from keras_moe.cli.versions import backend_and_versions


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for.

    Args:
        args: arguments of `arguments.limoe`.
        console: console that people read.
    """
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
    texts, images = configurations.soft_minima(base.moe.num_experts)
    thresholds = configurations.threshold_configurations(
        base, args.text_experts or texts, args.image_experts or images
    )
    groups = configurations.group_configurations(base)

    def rows(overrides):
        return {
            name: [pairs.new_run(own, seed, name) for seed in range(args.seeds)]
            for name, own in overrides.items()
        }

    make = {
        "losses": lambda name: Comparison(
            study,
            name,
            "Auxiliary losses",
            rows(configurations.loss_configurations(base)),
        ),
        "selected": lambda name: Comparison(
            study,
            name,
            "Selected experts (Table 6)",
            rows(configurations.selected_configurations(base, args.selected or (1, 2))),
        ),
        "thresholds": lambda name: Thresholds(
            study,
            name,
            "Global entropy thresholds (Figures 8 to 10)",
            rows({threshold_label(*k): x for k, x in thresholds.items()}),
            list(thresholds),
        ),
        "orders": lambda name: Comparison(
            study,
            name,
            "Dispatch orders (Figure 6)",
            rows(configurations.order_configurations(base)),
        ),
        "routers": lambda name: Comparison(
            study,
            name,
            "Routers (Table 7)",
            rows(configurations.router_configurations(base, args.text_pool)),
        ),
        "groups": lambda name: Groups(
            study,
            name,
            "Groups of a batch (Figure 16)",
            rows({group_label(count): x for count, x in groups.items()}),
            list(groups),
        ),
        "pruning": lambda name: Pruning(
            study,
            pairs,
            configurations.pruning_configurations(base),
            kept_counts(base.moe.num_experts, base.moe.num_selected_experts),
            args.seeds,
        ),
    }
    parts = {name: make[name](name) for name in make if name in args.parts}
    return run_parts(study, parts)


class Placed(Comparison):
    """Configurations that have places on an axis.

    Args:
        study: the study.
        name: name of the part, and of its picture.
        title: title of its table and picture.
        rows: runs of each configuration by its name, one for each seed.
        places: places of the configurations, in their order.
    """

    def __init__(self, study: Study, name: str, title: str, rows: dict, places: list):
        super().__init__(study, name, title, rows)
        self.places = places


class Thresholds(Placed):
    """Figures 8 to 10."""

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = every[self.name]["rows"].values()
        plots.plot_entropy_thresholds(
            [
                {"text": text, "image": image, "figures": row["figures"]}
                for (text, image), row in zip(self.places, rows)
            ],
            path,
        )
        return [path]


class Groups(Placed):
    """Figure 16."""

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = every[self.name]["rows"].values()
        plots.plot_group_sizes(
            {
                count: {"r1": row["figures"]["r1"], "seconds": row["epoch_seconds"]}
                for count, row in zip(self.places, rows)
            },
            path,
        )
        return [path]


def threshold_label(text: float, image: float) -> str:
    """The name of a row of thresholds.

    Args:
        text: soft minimum of text experts.
        image: soft minimum of image experts.
    """
    return f"text {text:g}, image {image:g}"


def group_label(count: int) -> str:
    """The name of a row of groups.

    Args:
        count: number of groups.
    """
    return "1 group" if count == 1 else f"{count} groups"
