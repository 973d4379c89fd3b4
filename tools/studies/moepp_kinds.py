"""Parts of the study of MoE++ about its kinds of experts: Table C, Figures 3 and A."""

import functools
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import analysis
from keras_moe.analysis import plots
from tools.studies import plots as study_plots
from tools.studies.moepp_training import Digits, Training, preset_settings
from tools.studies.study import (
    Part,
    Run,
    Study,
    Tell,
    percent,
    plain,
    plus_minus,
    spread,
)

# The rows of Table C.
REMOVALS = (
    "zero",
    "copy",
    "constant",
    ("zero", "copy"),
    ("zero", "constant"),
    ("copy", "constant"),
    ("zero", "copy", "constant"),
)
IN_PLACE = ("zero", "copy", "constant")
# Patches by how much there is to see in them, at this standard deviation of pixels.
PLAIN_BELOW = 0.1
PATCHES = ("plain", "with an edge")
PICTURE_IMAGES = 10


class Kinds(Part):
    """One trained MoE++ for each seed, without kinds of experts and by token."""

    def __init__(self, study: Study, digits: Digits, seeds: int):
        super().__init__(study)
        self.digits = digits
        settings = {**preset_settings({}), "removals": plain(REMOVALS)}
        self.runs = [
            Run("kinds", seed, settings, functools.partial(self.measure, seed))
            for seed in range(seeds)
        ]

    def measure(self, seed: int, tell: Tell) -> tuple[dict, dict]:
        """Trains from a seed; removes kinds, and counts who serves which patch."""
        model, (images, labels), _ = self.digits.fit({}, seed, tell)
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
            kind: analysis.compute_map(
                routing, backbone.expert_types, backbone.grid, kind
            )
            for kind in ("ffn", *IN_PLACE)
        }
        is_plain = deviation_of_patches(images, backbone.grid) < PLAIN_BELOW
        by_patch = {
            kind: [
                float(values[is_plain].mean()) if is_plain.any() else 0.0,
                float(values[~is_plain].mean()) if not is_plain.all() else 0.0,
            ]
            for kind, values in maps.items()
        }
        chosen = np.argsort(labels, kind="stable")
        chosen = chosen[:: max(len(chosen) // PICTURE_IMAGES, 1)][:PICTURE_IMAGES]
        without = map(share, ablation.ablated)
        result = {
            "whole": share(ablation.accuracy),
            "without": dict(zip(ablation.experts.tolist(), without)),
            "per_patch": by_patch,
            "plain_patches": float(is_plain.mean()),
        }
        kept = {kind: maps[kind][chosen] for kind in IN_PLACE}
        return result, {"images": images[chosen], **kept}


class Removal(Kinds):
    """Table C: accuracies with all kinds, and without some."""

    def results(self) -> dict:
        runs = self.study.finish_all(self.runs)
        return {
            "whole": spread([run["whole"] for run in runs]),
            "without": {
                name: spread([run["without"][name] for run in runs])
                for name in runs[0]["without"]
            },
        }

    def show(self, results: dict, console: Console) -> None:
        table = Table(title="Kinds of experts removed after training (Table C)")
        table.add_column("removed")
        table.add_column("accuracy %", justify="right")
        for name, value in {"none": results["whole"], **results["without"]}.items():
            table.add_row(name, percent(value, 2))
        console.print(table)


class Tokens(Kinds):
    """Figure A: how many experts of each kind a patch meets."""

    def results(self) -> dict:
        runs = self.study.finish_all(self.runs)
        return {
            "plain_patches": runs[0]["plain_patches"],
            "per_patch": {
                kind: {
                    patch: spread([run["per_patch"][kind][place] for run in runs])
                    for place, patch in enumerate(PATCHES)
                }
                for kind in runs[0]["per_patch"]
            },
        }

    def show(self, results: dict, console: Console) -> None:
        table = Table(
            title="Experts that serve a patch "
            f"({results['plain_patches']:.0%} of the patches are plain; Figure A)"
        )
        table.add_column("kind")
        for patch in PATCHES:
            table.add_column(patch, justify="right")
        for kind, row in results["per_patch"].items():
            table.add_row(kind, *(plus_minus(row[patch]) for patch in PATCHES))
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        """The first seed's images."""
        arrays = self.study.arrays(self.runs[0])
        path = self.study.folder / "kinds.png"
        maps = {kind: arrays[kind] for kind in IN_PLACE}
        plots.plot_type_maps(
            arrays["images"], maps, path, title="Zero-computation experts per token"
        )
        return [path]


class Constants(Training):
    """Figure 3: MoE++ with several numbers of constant experts, all else as it is."""

    def __init__(self, study: Study, digits: Digits, seeds: int, counts: Sequence[int]):
        super().__init__(study, digits, seeds, taus=())
        self.configurations = {
            f"{count} constant": {"constant_experts": count} for count in counts
        }

    def results(self) -> dict:
        rows = super().results()["rows"]
        own = ("test_accuracy", "ffn_experts_per_token")
        return {
            name.removesuffix(" constant"): {key: row[key] for key in own}
            for name, row in rows.items()
        }

    def show(self, results: dict, console: Console) -> None:
        table = Table(
            title="Constant experts beside a zero and a copy expert (Figure 3)"
        )
        for column in ("constant experts", "accuracy %", "FFN per token"):
            table.add_column(column, justify="right")
        for count, row in results.items():
            per_token = row["ffn_experts_per_token"]["mean"]
            table.add_row(count, percent(row["test_accuracy"], 2), f"{per_token:.3f}")
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        picture = self.study.folder / "constants.png"
        study_plots.plot_constant_experts(every["constants"], picture)
        return [picture]


def deviation_of_patches(images: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The standard deviation of the pixels of each patch, (B, rows, columns)."""
    count, height, width, channels = images.shape
    size = (height // grid[0], width // grid[1])
    patches = images.reshape(count, grid[0], size[0], grid[1], size[1], channels)
    return patches.std(axis=(2, 4, 5))
