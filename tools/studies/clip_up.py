"""Repeat the ablations of CLIP-UP on small pairs of images and captions.

upcycling compares dense models, models upcycled from them and models from scratch at
equal steps (Figure 4): those of the dense recipe and the upcycled one's together, or
--epochs and --steps in all, of which 56% are dense as in the paper. backbones compares
two towers with one transformer for both modalities, with LIMoE's entropy losses and
without (Tables 1 and 4), modalities has experts for texts, images or both (Figure 5),
capacity two capacity factors (Figure 6), gates normalises the gates or not (Figure 8).

All models are evaluated with the capacity and the groups of their training, as the
paper does, whose Figure 7 shows the tokens that are dropped then: with every token
served, capacity factors would be the same at the start, and normalisations, too.
"""

import argparse
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console

from keras_moe import models
from keras_moe.cli._arguments import RESUMES, Result
from keras_moe.layers import MoEConfig
from keras_moe.training import Contrastive, Recipe, load_recipe
from tools.studies import plots
from tools.studies.pairs import (
    Comparison,
    PairTraining,
    add_pairs,
    chosen_rows,
    new_study,
    recipe_of,
    run_comparisons,
)
from tools.studies.study import (
    OnProgress,
    Run,
    Study,
    add_parts,
    arrays_as_weights,
    weights_as_arrays,
)

EXAMPLES = """\
python -m tools.studies clip-up --parts upcycling
python -m tools.studies clip-up --parts modalities gates --seeds 5
python -m tools.studies clip-up --data folder:pairs --steps 500"""
INTERRUPTED = RESUMES
PARTS = ("upcycling", "backbones", "modalities", "capacity", "gates")
SEPARATED, SHARED = "separated", "shared"
DENSE_FIRST, DENSE = "dense, before it is upcycled", "dense"
METRIC = Contrastive.monitor.metric
SCRATCH, UPCYCLED = "from scratch", "upcycled"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    parser.add_argument(
        "--dense-recipe",
        default="clip_emoji",
        metavar="RECIPE",
        help="The recipe whose optimizer and schedule dense models and those from "
        "scratch have.",
    )
    add_pairs(parser, "clip_up", "clip_up_emoji")


def run(args: argparse.Namespace, console: Console) -> Result:
    recipe = evaluated_with_capacity(recipe_of(args))
    config = config_of(recipe)
    pairs = PairTraining(recipe, args.data_dir)
    study = new_study(args, pairs, console)
    schedules = lengths(
        load_recipe(args.dense_recipe), recipe, args.epochs or args.steps
    )
    source = UpcycledPairs(study, pairs, schedules, config, args.seeds)
    rows = chosen_rows(tables_of(source, config), args.parts, args.only)

    def new_part(name):
        cls, title = COMPARISONS[name]
        return cls(study, name, title, rows[name])

    return run_comparisons(study, {name: new_part(name) for name in rows})


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


class UpcycledPairs:
    """Dense models of pairs for each seed, and mixtures of experts made of them."""

    def __init__(
        self,
        study: Study,
        pairs: PairTraining,
        lengths: Lengths,
        config: dict,
        seeds: int,
    ):
        self.study, self.pairs, self.seeds = study, pairs, seeds
        self.lengths = lengths
        self.of_backbone = {
            SEPARATED: {},
            SHARED: shared_backbone(config),
        }

    def dense_runs(
        self, backbone: str = SEPARATED, is_whole: bool = False
    ) -> list[Run]:
        """Runs of the dense model, one for each seed."""
        return [self._dense_run(backbone, is_whole, seed) for seed in range(self.seeds)]

    def scratch_runs(
        self, overrides: Overrides, backbone: str = SEPARATED
    ) -> list[Run]:
        """Runs of a sparse model from scratch, one for each seed."""
        own = {**self.of_backbone[backbone], **overrides, **self.lengths.whole}
        return [
            self.pairs.new_run(own, seed, f"{backbone}, from scratch")
            for seed in range(self.seeds)
        ]

    def upcycled_runs(
        self, overrides: Overrides, backbone: str = SEPARATED
    ) -> list[Run]:
        """Runs of a model that is upcycled, one for each seed."""
        own = {**self.of_backbone[backbone], **overrides, **self.lengths.upcycled}
        rows = []
        for seed in range(self.seeds):
            settings = {
                "overrides": own,
                "dense": self.study.settings_of(self._dense_run(backbone, False, seed)),
            }
            make = functools.partial(self._upcycle, own, backbone, seed)
            rows.append(Run("upcycled", seed, settings, make, f"{backbone}, upcycled"))
        return rows

    def _dense_overrides(self, backbone, is_whole):
        return {
            **self.of_backbone[backbone],
            **without_experts(backbone),
            **(self.lengths.whole if is_whole else self.lengths.dense),
        }

    def _dense_run(self, backbone, is_whole, seed):
        overrides = self._dense_overrides(backbone, is_whole)
        make = functools.partial(self._train_dense, overrides, seed)
        return Run("dense", seed, {"overrides": overrides}, make, f"{backbone}, dense")

    def _train_dense(
        self, overrides: Overrides, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """Trains a dense model, and keeps its weights."""
        model, result = self.pairs.train(overrides, seed, on_progress)
        return result, weights_as_arrays(model.backbone)

    def _upcycle(self, overrides, backbone, seed, on_progress):
        run = self._dense_run(backbone, False, seed)
        self.study.finish(run, on_progress)
        dense = self._new_dense(backbone, seed)
        dense.backbone.set_weights(arrays_as_weights(self.study.arrays(run)))
        return self.pairs.train(overrides, seed, on_progress, dense)[1], {}

    def _new_dense(self, backbone: str, seed: int) -> keras.Model:
        overrides: dict[str, Any] = self._dense_overrides(backbone, False)
        return self.pairs.recipe.replace(**{**overrides, "seed": seed}).new_model(None)


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
                f"experts in {' and '.join(names)}": experts_in(*names)
                for names in towers
            }
        ),
        "capacity": upcycled(capacity_configurations(config)),
        "gates": upcycled(gate_configurations(config)),
    }


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
COMPARISONS = {
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
    for backbone, factor in ((SHARED, SHARED_FACTOR), (SEPARATED, 1)):
        entropy = entropy_losses(
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
    own = [router_arguments(config[tower])["evaluation"] for tower in TOWERS]
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
    config = blueprint.backbone.make_config(blueprint.config).to_dict()
    towers = [config.get(tower) for tower in TOWERS]
    if not all(
        isinstance(x, dict) and (x["moe"] or {}).get("moe_layers") for x in towers
    ):
        raise ValueError(
            "Expected a recipe of two towers with experts in both; received: "
            f"preset={recipe.model.preset!r}"
        )
    return config


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
