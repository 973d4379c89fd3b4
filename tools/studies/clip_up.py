"""`python -m tools.studies clip-up`: the ablations of *CLIP-UP* on small pairs.

`upcycling` compares a dense model, one upcycled from it and one from scratch at equal
steps (Figure 4); `backbones` separated towers with one transformer for both, upcycled
and from scratch, with LIMoE's entropy losses and without (Tables 1 and 4);
`modalities` has experts for texts, for images and for both (appendix B.1); `capacity`
two capacity factors (B.2); `gates` normalises the gates or not (B.3).

All models are evaluated with the capacity and the groups of their training, as the
paper does, whose Figure 7 shows the tokens that are dropped then: with every token
served, capacity factors would be the same at the start, and normalisations, too.
"""

import argparse
from pathlib import Path

from rich.console import Console

from keras_moe import models
from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from keras_moe.models.overrides import complete_config
from keras_moe.training import Contrastive, Recipe, load_recipe
from tools.studies import clip_up_configurations as configurations
from tools.studies import plots
from tools.studies.clip_up_configurations import Lengths
from tools.studies.clip_up_training import SEPARATED, SHARED, UpcycledPairs
from tools.studies.pair_parts import (
    Comparison,
    chosen_rows,
    run_comparisons,
)
from tools.studies.pair_training import PairTraining, recipe_of
from tools.studies.study import Run, Study

DENSE_FIRST, DENSE = "dense, before it is upcycled", "dense"
METRIC = Contrastive.monitor.metric
SCRATCH, UPCYCLED = "from scratch", "upcycled"


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for."""
    recipe = evaluated_with_capacity(recipe_of(args))
    config = config_of(recipe)
    pairs = PairTraining(recipe, args.data_dir)
    study = Study(
        args.output,
        {**pairs.settings(), **backend_and_versions()},
        console,
        args.restart,
    )
    source = UpcycledPairs(study, pairs, lengths_of(args, recipe), config, args.seeds)
    rows = chosen_rows(tables_of(source, config), args.parts, args.only)

    def new_part(name):
        cls, title = PARTS[name]
        return cls(study, name, title, rows[name])

    return run_comparisons(study, {name: new_part(name) for name in rows})


def tables_of(source: UpcycledPairs, config: dict) -> dict[str, dict[str, list[Run]]]:
    """Runs by part and row."""

    def upcycled(rows):
        return {name: source.upcycled_runs(own) for name, own in rows.items()}

    towers = (("text",), ("image",), ("image", "text"))
    return {
        "upcycling": {
            DENSE_FIRST: source.dense_runs(),
            DENSE: source.dense_runs(is_whole=True),
            SCRATCH: source.scratch_runs({}),
            UPCYCLED: source.upcycled_runs({}),
        },
        "backbones": backbone_runs(source, config),
        "modalities": upcycled(
            {
                f"experts in {' and '.join(names)}": configurations.experts_in(*names)
                for names in towers
            }
        ),
        "capacity": upcycled(configurations.capacity_configurations(config)),
        "gates": upcycled(configurations.gate_configurations(config)),
    }


def lengths_of(args: argparse.Namespace, recipe: Recipe) -> Lengths:
    """The schedules of dense, upcycled and other models."""
    dense = load_recipe(args.dense_recipe)
    total = args.epochs or args.steps
    return configurations.lengths(dense, recipe, total)


class Upcycling(Comparison):
    """Dense models, upcycled ones and those from scratch, at equal steps."""

    def draw(self, every: dict) -> list[Path]:
        rows = every[self.name]["rows"]
        # Parts of a run, one after the other, by their numbers of epochs.
        curves = {
            name: {"start": 0, "accuracy": row["history"][METRIC]}
            for name, row in rows.items()
        }
        if {DENSE_FIRST, UPCYCLED} <= {*rows}:
            before = len(curves[DENSE_FIRST]["accuracy"])
            curves[UPCYCLED]["start"] = before
        for curve in curves.values():
            curve["end"] = curve["start"] + len(curve["accuracy"])
        path = self.study.folder / "upcycling_curves.png"
        plots.plot_pair_training(curves, path)
        return [*super().draw(every), path]


# The class and the title of each part.
PARTS = {
    "upcycling": (
        Upcycling,
        "Dense, from scratch and upcycled, at equal steps (Figure 4)",
    ),
    "backbones": (Comparison, "Backbones (Tables 1 and 4)"),
    "modalities": (Comparison, "Experts in one modality or both (Figure 5)"),
    "capacity": (Comparison, "Capacity factors, as the paper counts them (Table 7)"),
    "gates": (Comparison, "Normalisation of the gates (Figure 8)"),
}


def backbone_runs(source: UpcycledPairs, config: dict) -> dict[str, list]:
    """Tables 1 and 4: eight models."""
    moe = config["image"]["moe"]
    rows = {}
    for backbone, factor in ((SHARED, configurations.SHARED_FACTOR), (SEPARATED, 1)):
        entropy = configurations.entropy_losses(
            backbone, moe["auxiliary_losses"], factor * moe["num_experts"]
        )
        for start, make in (
            (SCRATCH, source.scratch_runs),
            (UPCYCLED, source.upcycled_runs),
        ):
            rows[f"{backbone}, {start}"] = make({}, backbone)
            rows[f"{backbone}, {start}, entropy losses"] = make(entropy, backbone)
    return rows


def evaluated_with_capacity(recipe: Recipe) -> Recipe:
    """The recipe, whose models keep their capacity at evaluation unless it says."""
    config = config_of(recipe)
    own = [
        configurations.router_arguments(config[tower])["evaluation"]
        for tower in configurations.TOWERS
    ]
    if own != [None, None]:
        return recipe
    return recipe.replace(**{"model.evaluation": "official"})


def config_of(recipe: Recipe) -> dict:
    """The arguments of a recipe's backbone."""
    blueprint = models.resolve(
        recipe.model.preset,
        recipe.model.overrides,
        load_weights=recipe.model.load_weights,
    )
    config = complete_config(blueprint.backbone, blueprint.config)
    towers = [config.get(tower) for tower in configurations.TOWERS]
    if not all(
        isinstance(x, dict) and (x["moe"] or {}).get("moe_layers") for x in towers
    ):
        raise ValueError(
            "Expected a recipe of two towers with experts in both; received: "
            f"preset={recipe.model.preset!r}"
        )
    return config
