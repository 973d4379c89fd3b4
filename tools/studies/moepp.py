"""Compare MoE++ with a vanilla mixture of as many experts: cost, speed, accuracy.

costs counts the numbers of the paper's Tables 1, A and B; speed measures expert forward
times by tau, as Table 3; training trains on the bundled digits: the vanilla twin, MoE++
by tau, without each type of expert (Table 5) and without gating residuals (Table 6).
removal removes types of experts after training (Table C), tokens counts the
zero-computation experts that patches meet (Figure A), and constants trains with
--constants constant experts (Figure 3).

The models that train are the preset moepp_digits and changes of it.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console

from keras_moe import analysis, data, models
from keras_moe.analysis import plots
from keras_moe.cli._arguments import RESUMES, Result, add_count, positive
from keras_moe.cli.train import backend_and_versions
from keras_moe.ops import ExpertTypes
from tools.studies import plots as study_plots
from tools.studies.moepp_layers import Costs, Sizes, Speed
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    Watch,
    add_numbers,
    add_parts,
    add_training,
    check_parts,
    compile_with_cosine,
    new_table,
    percent,
    plus_minus,
    run_parts,
    run_settings,
    spread,
    spread_of,
)

EXAMPLES = """\
python -m tools.studies moepp
python -m tools.studies moepp --parts costs speed --kinds 16 1 1 2
python -m tools.studies moepp --parts training --seeds 5 --epochs 40"""
INTERRUPTED = RESUMES
PARTS = ("costs", "speed", "training", "removal", "tokens", "constants")
PRESET = "moepp_digits"
TAU = 0.75
NO_RESIDUALS = "no gating residuals"
# Overrides of the preset by the model's name, besides those by tau: Tables 5 and 6.
MODELS = {
    "vanilla": {
        "zero_experts": 0,
        "copy_experts": 0,
        "constant_experts": 0,
        "gating_residual": False,
    },
    "only zero": {"copy_experts": 0, "constant_experts": 0},
    "only copy": {"zero_experts": 0, "constant_experts": 0},
    "only constant": {"zero_experts": 0, "copy_experts": 0},
    "only zero and copy": {"constant_experts": 0},
    "only zero and constant": {"copy_experts": 0},
    "only copy and constant": {"zero_experts": 0},
    NO_RESIDUALS: {"gating_residual": False},
}
# Numbers of constant experts, of Figure 3.
CONSTANTS = (0, 1, 2, 4, 6)
IN_PLACE = ("zero", "copy", "constant")
# The rows of Table C.
REMOVALS = (
    *IN_PLACE,
    ("zero", "copy"),
    ("zero", "constant"),
    ("copy", "constant"),
    IN_PLACE,
)
# Patches by how much there is to see in them, at this standard deviation of pixels.
PLAIN_BELOW = 0.1
PATCHES = ("plain", "with an edge")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    taus = [0.1, 0.25, 0.5, 0.75, 1.0]
    add_numbers(parser, "--taus", "TAU", "The values of tau.", taus)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="MODEL",
        help="The names of the models that train; without it, all.",
    )
    add_count(
        parser,
        "--constants",
        "The numbers of constant experts of Figure 3; by default "
        f"{' '.join(map(str, CONSTANTS))}.",
        minimum=0,
        nargs="+",
    )
    add_training(parser, "moepp_study", 30, 32, 3e-3)
    layer = parser.add_argument_group("the layer of costs and speed")
    for name, default, text in (
        ("tokens", 4096, "The number of tokens."),
        ("dim", 768, "The size of a token."),
        ("mlp-dim", 2048, "The size of an expert's hidden layer."),
        ("selected", 2, "The number of experts of a token."),
        ("rounds", 9, "The number of rounds of timing."),
    ):
        add_count(layer, f"--{name}", text, default)
    add_count(
        layer,
        "--kinds",
        "The number of experts of each type.",
        [8, 1, 1, 2],
        minimum=0,
        nargs=4,
        metavar=("FFN", "ZERO", "COPY", "CONSTANT"),
    )
    layer.add_argument(
        "--gamma", type=positive, default=1.1, help="The capacity factor."
    )
    layer.add_argument("--gated", action="store_true", help="Use SwiGLU-like experts.")


def run(args: argparse.Namespace, console: Console) -> Result:
    expert_types = ExpertTypes(*args.kinds)
    if not expert_types.zero_computation:
        raise ValueError(
            f"Expected zero-computation experts; received: --kinds {args.kinds}"
        )
    check_parts(args, only="training", constants="constants")
    sizes = Sizes(
        expert_types,
        args.tokens,
        args.dim,
        args.mlp_dim,
        args.selected,
        args.gamma,
        args.gated,
    )
    settings = run_settings(args)
    study = Study(
        args.output, {**settings, **backend_and_versions()}, console, args.restart
    )
    digits = Digits(**settings)
    make = {
        "costs": lambda: Costs(study, sizes, args.taus, args.rounds),
        "speed": lambda: Speed(study, sizes, args.taus, args.rounds, draw_tau),
        "training": lambda: Training(
            study, digits, args.seeds, chosen_models(args.taus, args.only)
        ),
        "removal": lambda: Removal(study, digits, args.seeds),
        "tokens": lambda: Tokens(study, digits, args.seeds),
        "constants": lambda: Constants(
            study, digits, args.seeds, args.constants or CONSTANTS
        ),
    }
    return run_parts(
        study, {name: make[name]() for name in PARTS if name in args.parts}
    )


class Digits(NamedTuple):
    """How the preset is trained on the bundled digits.

    Attributes:
        epochs: number of epochs.
        batch_size: images in a step.
        learning_rate: learning rate after the warm-up.
    """

    epochs: int
    batch_size: int
    learning_rate: float

    def fit(self, overrides: dict, seed: int, on_progress: OnProgress) -> tuple:
        """A model trained from a seed, the test images with labels, and seconds."""
        keras.utils.set_random_seed(seed)
        model = models.from_preset(
            PRESET, num_classes=10, seed=seed, load_weights=False, **overrides
        )
        shape = model.backbone.image_shape
        batches = data.load(
            "digits",
            "train",
            shape,
            batch_size=self.batch_size,
            seed=seed,
            augment=["translation", "rotation"],
            drop_remainder=True,
        )
        test = list(data.load("digits", "test", shape, batch_size=self.batch_size))
        images = np.concatenate([x.numpy() for x, _ in test])
        labels = np.concatenate([y.numpy() for _, y in test])
        compile_with_cosine(model, self.epochs * len(batches), self.learning_rate)
        begin = time.perf_counter()
        model.fit(
            batches,
            epochs=self.epochs,
            shuffle=False,  # The batches come shuffled.
            verbose=0,
            callbacks=[Watch(on_progress)],
        )
        return model, (images, labels), time.perf_counter() - begin


def preset_settings(overrides: dict) -> dict:
    """The settings of a run that name its model."""
    config = models.registry.builtin_presets()[PRESET]["config"]
    return {"preset": PRESET, "config": config, "overrides": overrides}


def chosen_models(
    taus: Sequence[float], only: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Overrides of the preset by the name of each model that trains."""
    by_tau = {f"tau={tau:g}": {"tau": tau} for tau in sorted({*taus, TAU})}
    rows = {"vanilla": MODELS["vanilla"], **by_tau, **MODELS}
    unknown = sorted(set(only or ()) - set(rows))
    if unknown:
        raise ValueError(
            f"Expected models of {', '.join(rows)}; received: {', '.join(unknown)}"
        )
    return {name: rows[name] for name in only or rows}


class Training(Part):
    """Tables 3, 5 and 6: models of given overrides, by name."""

    def __init__(self, study: Study, digits: Digits, seeds: int, rows: dict[str, dict]):
        super().__init__(study)
        self.digits, self.seeds, self.rows = digits, seeds, rows

    def new_run(self, name: str, seed: int) -> Run:
        """The run of a model from a seed."""
        overrides = self.rows[name]
        train = functools.partial(self.train, overrides, seed)
        return Run(name, seed, preset_settings(overrides), train)

    def results(self) -> dict:
        runs = [self.new_run(name, x) for name in self.rows for x in range(self.seeds)]
        rows = {}
        for name, results in self.study.finish_all(runs).items():
            spreads = ("test_accuracy", "ffn_experts_per_token")
            rows[name] = {key: spread_of(results, key) for key in spreads}
            rows[name] |= {
                key: results[0][key] for key in ("gflops", "loads", "scores")
            }
        return {"preset": PRESET, "epochs": self.digits.epochs, "rows": rows}

    def train(
        self, overrides: dict, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """Trains from a seed, and measures what the experts did with the test
        images."""
        model, (images, labels), seconds = self.digits.fit(overrides, seed, on_progress)
        outputs = keras.Model(
            model.input, {"logits": model.output, "routing": model.routing}
        ).predict(images, batch_size=self.digits.batch_size, verbose=0)
        backbone = model.backbone
        expert_types, routing = backbone.expert_types, outputs["routing"]
        selected = backbone.moe.router_arguments["num_selected_experts"]
        loads = analysis.load_by_type(routing, expert_types, selected)
        scores = {
            block: analysis.routing_scores(record) for block, record in routing.items()
        }
        last = scores[list(scores)[-1]]
        maps = analysis.compute_map(routing, expert_types, backbone.grid)
        per_token = analysis.experts_per_token(routing, expert_types)
        description = models.describe(
            PRESET, num_classes=10, load_weights=False, **overrides
        )
        result = {
            "test_accuracy": float((outputs["logits"].argmax(-1) == labels).mean()),
            "ffn_experts_per_token": float(per_token.mean()),
            "gflops": description.gflops,
            "loads": {block: row._asdict() for block, row in loads.items()},
            "scores": {block: row.to_dict() for block, row in scores.items()},
            "seconds": seconds,
        }
        chosen = of_all_classes(labels[: len(labels) // 2], 12)
        kept = {
            "images": images[chosen],
            "maps": maps[chosen],
            "highest": last.highest,
            "second": last.second,
        }
        return result, kept

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"{results['preset']} on digits, {results['epochs']} epochs "
            "(Tables 3, 5, 6)",
            "model",
            *("accuracy %", "FFN per token", "MFLOPs per image", "variance of gates"),
        )
        for name, row in results["rows"].items():
            last = row["scores"][list(row["scores"])[-1]]
            table.add_row(
                name,
                percent(row["test_accuracy"], 2),
                f"{row['ffn_experts_per_token']['mean']:.3f}",
                f"{1e3 * row['gflops']:.2f}",
                f"{last['highest_variance']:.4f}, {last['second_variance']:.4f}",
            )
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        """Compute over images, loads by type, and scores with and without residuals."""
        folder = self.study.folder
        labels = {f"tau={TAU:g}": "with gating residuals", NO_RESIDUALS: "without"}
        arrays = {
            name: self.study.arrays(self.new_run(name, seed=0))
            for name in labels
            if name in self.rows
        }
        if not arrays:
            return []
        first = next(iter(arrays))
        compute, loads, scores = (
            folder / f"{name}.png" for name in ("compute", "loads", "scores")
        )
        kept = arrays[first]
        plots.plot_compute_maps(kept["images"], kept["maps"], compute)
        by_block = every["training"]["rows"][first]["loads"]
        plots.plot_load_by_type(
            {block: analysis.TypeLoads(**row) for block, row in by_block.items()}, loads
        )
        plots.plot_routing_scores(
            {
                labels[name]: analysis.RoutingScores(kept["highest"], kept["second"])
                for name, kept in arrays.items()
            },
            scores,
            title="Gates of the last MoE block",
        )
        return [compute, loads, scores, *draw_tau(folder, every)]


def draw_tau(folder: Path, every: dict) -> list[Path]:
    """Speed and accuracy by tau, if both parts have results."""
    rows = every.get("training", {}).get("rows", {})
    if "speed" not in every or not {"vanilla", f"tau={TAU:g}"} <= set(rows):
        return []
    picture = folder / "tau.png"
    study_plots.plot_tau_study(every["speed"], every["training"], picture)
    return [picture]


class Constants(Training):
    """Figure 3: MoE++ with several numbers of constant experts."""

    def __init__(self, study: Study, digits: Digits, seeds: int, counts: Sequence[int]):
        rows = {f"{count} constant": {"constant_experts": count} for count in counts}
        super().__init__(study, digits, seeds, rows)

    def results(self) -> dict:
        own = ("test_accuracy", "ffn_experts_per_token")
        return {
            name.removesuffix(" constant"): {key: row[key] for key in own}
            for name, row in super().results()["rows"].items()
        }

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            "Constant experts beside a zero and a copy expert (Figure 3)",
            *("constant experts", "accuracy %", "FFN per token"),
        )
        for count, row in results.items():
            per_token = row["ffn_experts_per_token"]["mean"]
            table.add_row(count, percent(row["test_accuracy"], 2), f"{per_token:.3f}")
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        picture = self.study.folder / "constants.png"
        study_plots.plot_constant_experts(every["constants"], picture)
        return [picture]


class TypesOfExperts(Part):
    """One trained MoE++ for each seed, without types of experts and by token."""

    def __init__(self, study: Study, digits: Digits, seeds: int):
        super().__init__(study)
        self.digits = digits
        settings = {**preset_settings({}), "removals": REMOVALS}
        self.runs = [
            Run("kinds", seed, settings, functools.partial(self.measure, seed))
            for seed in range(seeds)
        ]

    def finished(self) -> list[dict]:
        """The results of all seeds."""
        return self.study.finish_all(self.runs)["kinds"]

    def measure(self, seed: int, on_progress: OnProgress) -> tuple[dict, dict]:
        """Trains from a seed; removes types, and counts who serves which patch."""
        model, (images, labels), _ = self.digits.fit({}, seed, on_progress)
        batch_size = self.digits.batch_size
        ablation = analysis.ablate_experts(
            model, images, labels, "all", REMOVALS, batch_size=batch_size, verbose=0
        )

        def share(by_class):
            return float((by_class * ablation.counts).sum() / len(labels))

        backbone = model.backbone
        routing = keras.Model(model.input, model.routing).predict(
            images, batch_size=batch_size, verbose=0
        )
        maps = {
            name: analysis.compute_map(
                routing, backbone.expert_types, backbone.grid, name
            )
            for name in ("ffn", *IN_PLACE)
        }
        is_plain = deviation_of_patches(images, backbone.grid) < PLAIN_BELOW
        by_patch = {
            name: [
                float(values[is_plain].mean()) if is_plain.any() else 0.0,
                float(values[~is_plain].mean()) if not is_plain.all() else 0.0,
            ]
            for name, values in maps.items()
        }
        without = map(share, ablation.ablated)
        result = {
            "whole": share(ablation.accuracy),
            "without": dict(zip(ablation.experts.tolist(), without)),
            "per_patch": by_patch,
            "plain_patches": float(is_plain.mean()),
        }
        chosen = of_all_classes(labels, 10)
        kept = {name: maps[name][chosen] for name in IN_PLACE}
        return result, {"images": images[chosen], **kept}


class Removal(TypesOfExperts):
    """Table C: accuracies with all types, and without some."""

    def results(self) -> dict:
        runs = self.finished()
        names = runs[0]["without"]
        return {
            "whole": spread_of(runs, "whole"),
            "without": {
                name: spread([run["without"][name] for run in runs]) for name in names
            },
        }

    def show(self, results: dict, console: Console) -> None:
        title = "Types of experts removed after training (Table C)"
        table = new_table(title, "removed", "accuracy %")
        for name, value in {"none": results["whole"], **results["without"]}.items():
            table.add_row(name, percent(value, 2))
        console.print(table)


class Tokens(TypesOfExperts):
    """Figure A: how many experts of each type a patch meets."""

    def results(self) -> dict:
        runs = self.finished()
        return {
            "plain_patches": runs[0]["plain_patches"],
            "per_patch": {
                name: {
                    patch: spread([run["per_patch"][name][index] for run in runs])
                    for index, patch in enumerate(PATCHES)
                }
                for name in runs[0]["per_patch"]
            },
        }

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"Experts that serve a patch ({results['plain_patches']:.0%} of the "
            "patches are plain; Figure A)",
            "type",
            *PATCHES,
        )
        for name, row in results["per_patch"].items():
            table.add_row(name, *(plus_minus(row[patch]) for patch in PATCHES))
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        """The first seed's images."""
        arrays = self.study.arrays(self.runs[0])
        path = self.study.folder / "kinds.png"
        maps = {name: arrays[name] for name in IN_PLACE}
        plots.plot_type_maps(
            arrays["images"], maps, path, title="Zero-computation experts per token"
        )
        return [path]


def of_all_classes(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices of a few examples that are spread over the classes."""
    order = np.argsort(labels, kind="stable")
    return order[:: max(len(order) // count, 1)][:count]


def deviation_of_patches(images: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The standard deviation of the pixels of each patch, (B, rows, columns)."""
    count, height, width, channels = images.shape
    size = (height // grid[0], width // grid[1])
    patches = images.reshape(count, grid[0], size[0], grid[1], size[1], channels)
    return patches.std(axis=(2, 4, 5))
