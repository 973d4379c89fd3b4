"""The part of the study of MoE++ that trains on digits: Tables 3, 5 and 6."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import analysis, data, models
from keras_moe.analysis import plots
from keras_moe.cli.fitting import compile_with_cosine, shifts_and_turns
from tools.studies import plots as study_plots
from tools.studies.study import Part, Run, Study, Tell, percent, spread
from tools.studies.watch import Watch

PRESET = "moepp_digits"
TAU = 0.75
VANILLA = {
    "zero_experts": 0,
    "copy_experts": 0,
    "constant_experts": 0,
    "gating_residual": False,
}
NO_RESIDUALS = "no gating residuals"
PICTURE_IMAGES = 12


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

    def fit(self, overrides: dict, seed: int, tell: Tell) -> tuple:
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
            augment=shifts_and_turns(),
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
            callbacks=[Watch(tell)],
        )
        return model, (images, labels), time.perf_counter() - begin


def preset_settings(overrides: dict) -> dict:
    """The settings of a run that name its model."""
    config = models.builtin.builtin_presets()[PRESET]["config"]
    return {"preset": PRESET, "config": config, "overrides": overrides}


class Training(Part):
    """The vanilla twin, MoE++ by tau, and without its parts.

    Args:
        study: the study.
        digits: settings of a model's training.
        seeds: number of seeds.
        taus: values of tau.
        only: names of the models to train; None for all.

    Raises:
        ValueError: if there is no model of a name.
    """

    def __init__(
        self,
        study: Study,
        digits: Digits,
        seeds: int,
        taus: Sequence[float],
        only: Sequence[str] | None = None,
    ):
        super().__init__(study)
        self.digits, self.seeds = digits, seeds
        self.configurations = configurations(taus)
        if only:
            unknown = sorted(set(only) - set(self.configurations))
            if unknown:
                raise ValueError(
                    f"Expected models of {', '.join(self.configurations)}; "
                    f"received: {', '.join(unknown)}"
                )
            self.configurations = {name: self.configurations[name] for name in only}

    def new_run(self, name: str, overrides: dict, seed: int) -> Run:
        """The run of a model from a seed."""
        train = functools.partial(self.train, overrides, seed)
        return Run(name, seed, preset_settings(overrides), train)

    def results(self) -> dict:
        runs = [
            self.new_run(name, overrides, seed)
            for name, overrides in self.configurations.items()
            for seed in range(self.seeds)
        ]
        by_name = {}
        for run, result in zip(runs, self.study.finish_all(runs)):
            by_name.setdefault(run.name, []).append(result)
        rows = {}
        for name, results in by_name.items():
            rows[name] = {
                key: spread([result[key] for result in results])
                for key in ("test_accuracy", "ffn_experts_per_token")
            }
            for key in ("gflops", "loads", "scores"):
                rows[name][key] = results[0][key]
        return {"preset": PRESET, "epochs": self.digits.epochs, "rows": rows}

    def train(self, overrides: dict, seed: int, tell: Tell) -> tuple[dict, dict]:
        """Trains from a seed, and measures what the experts did with the test images.

        Args:
            overrides: overrides of the preset's arguments.
            seed: seed of weights, noise, order and augmentation.
            tell: function that shows a text beside the bar.
        """
        model, (images, labels), seconds = self.digits.fit(overrides, seed, tell)
        outputs = keras.Model(
            model.input, {"logits": model.output, "routing": model.routing}
        ).predict(images, batch_size=self.digits.batch_size, verbose=0)
        backbone = model.backbone
        kinds, routing = backbone.expert_types, outputs["routing"]
        selected = backbone.moe.router_arguments["num_selected_experts"]
        loads = analysis.load_by_type(routing, kinds, selected)
        scores = {
            block: analysis.routing_scores(record) for block, record in routing.items()
        }
        last = scores[list(scores)[-1]]
        maps = analysis.compute_map(routing, kinds, backbone.grid)
        chosen = np.argsort(labels[: len(labels) // 2], kind="stable")
        chosen = chosen[:: max(len(chosen) // PICTURE_IMAGES, 1)][:PICTURE_IMAGES]
        result = {
            "test_accuracy": float((outputs["logits"].argmax(-1) == labels).mean()),
            "ffn_experts_per_token": float(
                analysis.experts_per_token(routing, kinds).mean()
            ),
            "gflops": models.describe(
                PRESET, num_classes=10, load_weights=False, **overrides
            ).gflops,
            "loads": {block: row._asdict() for block, row in loads.items()},
            "scores": {block: row.to_dict() for block, row in scores.items()},
            "seconds": seconds,
        }
        kept = {
            "images": images[chosen],
            "maps": maps[chosen],
            "highest": last.highest,
            "second": last.second,
        }
        return result, kept

    def show(self, results: dict, console: Console) -> None:
        table = Table(
            title=f"{results['preset']} on digits, {results['epochs']} epochs "
            "(Tables 3, 5, 6)"
        )
        columns = ("model", "accuracy %", "FFN per token", "MFLOPs per image")
        for column in (*columns, "variance of gates"):
            table.add_column(column, justify=None if column == "model" else "right")
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
        """Compute over images, loads by kind, and scores with and without residuals."""
        folder, arrays = self.study.folder, {}
        labels = {f"tau={TAU:g}": "with gating residuals", NO_RESIDUALS: "without"}
        for name in labels:
            if name in self.configurations:
                run = self.new_run(name, self.configurations[name], seed=0)
                arrays[name] = self.study.arrays(run)
        if not arrays:
            return []
        first = next(iter(arrays))
        paths = [folder / f"{name}.png" for name in ("compute", "loads", "scores")]
        plots.plot_compute_maps(
            arrays[first]["images"], arrays[first]["maps"], paths[0]
        )
        rows = every["training"]["rows"]
        loads = {
            block: analysis.TypeLoads(**row)
            for block, row in rows[first]["loads"].items()
        }
        plots.plot_load_by_type(loads, paths[1])
        scores = {
            labels[name]: analysis.RoutingScores(kept["highest"], kept["second"])
            for name, kept in arrays.items()
        }
        plots.plot_routing_scores(scores, paths[2], title="Gates of the last MoE block")
        return [*paths, *draw_tau(folder, every)]


def draw_tau(folder: Path, every: dict) -> list[Path]:
    """Speed and accuracy by tau, where both parts have results."""
    rows = every.get("training", {}).get("rows", {})
    if "speed" not in every or not {"vanilla", f"tau={TAU:g}"} <= set(rows):
        return []
    picture = folder / "tau.png"
    study_plots.plot_tau_study(every["speed"], every["training"], picture)
    return [picture]


def configurations(taus: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Overrides of the preset by the model's name."""
    rows = {"vanilla": VANILLA}
    for tau in sorted({*taus, TAU}):
        rows[f"tau={tau:g}"] = {"tau": tau}
    full = {"zero": 1, "copy": 1, "constant": 2}
    for kept in (
        ("zero",), ("copy",), ("constant",),
        ("zero", "copy"), ("zero", "constant"), ("copy", "constant"),
    ):  # fmt: skip
        counts = {f"{kind}_experts": n * (kind in kept) for kind, n in full.items()}
        rows[f"only {' and '.join(kept)}"] = counts
    rows[NO_RESIDUALS] = {"gating_residual": False}
    return rows
