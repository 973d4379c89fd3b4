"""`keras-moe study clip-up`: the ablations of *CLIP-UP* on small pairs.

`upcycling` compares a dense model, one upcycled from it and one from scratch at equal
steps (Figure 4); `backbones` separated towers with one transformer for both, upcycled
and from scratch, with LIMoE's entropy losses and without (Tables 1 and 4);
`modalities` has experts for texts, for images and for both (appendix B.1); `capacity`
two capacity factors (B.2); `gates` normalises the gates or not (B.3).
"""

import argparse
from pathlib import Path

from rich.console import Console

from keras_moe import models
from keras_moe.analysis import plots
from keras_moe.cli.result import Result
from keras_moe.cli.studies import clip_up_configurations as configurations
from keras_moe.cli.studies.clip_up_training import SEPARATED, SHARED, UpcycledPairs
from keras_moe.cli.studies.pair_parts import Comparison
from keras_moe.cli.studies.pair_training import PairTraining, recipe_of
from keras_moe.cli.studies.study import Study, run_parts
from keras_moe.cli.versions import backend_and_versions
from keras_moe.models.overrides import complete_config
from keras_moe.training import Recipe

DENSE_FIRST, DENSE = "dense, 56% of the steps", "dense"
SCRATCH, UPCYCLED = "from scratch", "upcycled"


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for.

    Args:
        args: arguments of `arguments.clip_up`.
        console: console that people read.
    """
    recipe = recipe_of(args)
    config = config_of(recipe)
    pairs = PairTraining(recipe, args.data_dir)
    study = Study(
        args.output,
        {**pairs.settings(), **backend_and_versions()},
        console,
        args.restart,
    )
    source = UpcycledPairs(study, pairs, config, args.seeds)

    def upcycled(rows):
        return {name: source.upcycled_rows(own) for name, own in rows.items()}

    make = {
        "upcycling": lambda: Upcycling(study, recipe, source),
        "backbones": lambda: Comparison(
            study,
            "backbones",
            "Backbones (Tables 1 and 4)",
            backbone_rows(source, config),
        ),
        "modalities": lambda: Comparison(
            study,
            "modalities",
            "Experts in one modality or both (Figure 5)",
            upcycled(
                {
                    f"experts in {' and '.join(towers)}": configurations.experts_in(
                        *towers
                    )
                    for towers in (("text",), ("image",), ("image", "text"))
                }
            ),
        ),
        "capacity": lambda: Comparison(
            study,
            "capacity",
            "Capacity factors, as the paper counts them (Table 7)",
            upcycled(configurations.capacity_configurations(config)),
        ),
        "gates": lambda: Comparison(
            study,
            "gates",
            "Gates (Figure 8)",
            upcycled(configurations.gate_configurations(config)),
        ),
    }
    return run_parts(study, {name: make[name]() for name in make if name in args.parts})


class Upcycling(Comparison):
    """Dense models, upcycled ones and those from scratch, at equal steps.

    Args:
        study: the study.
        recipe: the recipe.
        source: the models.
    """

    def __init__(self, study: Study, recipe: Recipe, source: UpcycledPairs):
        rows = {
            DENSE_FIRST: source.dense_rows(),
            DENSE: source.dense_rows(whole=True),
            SCRATCH: source.scratch_rows({}),
            UPCYCLED: source.upcycled_rows({}),
        }
        title = "Dense, from scratch and upcycled, at equal steps (Figure 4)"
        super().__init__(study, "upcycling", title, rows)
        self.recipe = recipe
        self.metric = recipe.objective.headline.metric

    def draw(self, every: dict) -> list[Path]:
        length, whole = configurations.length_of(self.recipe)
        share = configurations.DENSE_SHARE
        first = configurations.part_of_schedule(self.recipe, share)
        between = first[f"schedule.{length}"]
        places = {
            DENSE_FIRST: (0, between),
            DENSE: (0, whole),
            SCRATCH: (0, whole),
            UPCYCLED: (between, whole),
        }
        curves = {
            name: {
                "start": places[name][0],
                "end": places[name][1],
                "accuracy": row["history"][self.metric],
            }
            for name, row in every[self.name]["rows"].items()
        }
        path = self.study.folder / "upcycling_curves.png"
        plots.plot_pair_training(curves, path, length=length)
        return [*super().draw(every), path]


def backbone_rows(source: UpcycledPairs, config: dict) -> dict[str, list]:
    """Tables 1 and 4: eight models.

    Args:
        source: the models.
        config: arguments of the recipe's backbone.
    """
    moe = config["image"]["moe"]
    rows = {}
    for backbone, factor in ((SHARED, configurations.SHARED_FACTOR), (SEPARATED, 1)):
        entropy = configurations.entropy_losses(
            backbone, moe["auxiliary_losses"], factor * moe["num_experts"]
        )
        for start, make in (
            (SCRATCH, source.scratch_rows),
            (UPCYCLED, source.upcycled_rows),
        ):
            rows[f"{backbone}, {start}"] = make({}, backbone)
            rows[f"{backbone}, {start}, entropy losses"] = make(entropy, backbone)
    return rows


def config_of(recipe: Recipe) -> dict:
    """The arguments of a recipe's backbone.

    Args:
        recipe: a recipe of pairs.

    Raises:
        ValueError: if it has no two towers with experts.
    """
    blueprint = models.resolve(recipe.model.preset, recipe.model.overrides)
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
