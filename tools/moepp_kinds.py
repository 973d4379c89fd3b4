"""Parts of the study of MoE++ about its kinds of experts: Table C, Figures 3 and A."""

from typing import Any

import keras
import numpy as np
from results import plain, read_arrays, read_result, spread, write_arrays
from rich.console import Console
from rich.table import Table

from keras_moe import analysis
from keras_moe.analysis import plots
from keras_moe.files import write_json

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
ARRAYS = {"images", *IN_PLACE}


class Kinds:
    """One trained MoE++ for each seed, without kinds of experts and by token.

    Args:
        training: the study's `Training`, which says how a run is trained and stored.
    """

    def __init__(self, training: Any):
        self.training = training

    def run(self, progress: Any) -> list[dict]:
        """The results of all seeds; what is not there yet is trained."""
        task = progress.add_task("runs", total=self.training.args.seeds)
        runs = []
        for seed in range(self.training.args.seeds):
            progress.update(task, description=f"kinds of experts, seed {seed}")
            runs.append(self.one(seed)[0])
            progress.advance(task)
        return runs

    def one(self, seed: int) -> tuple[dict, dict]:
        """One run's result and arrays, of its files where they are whole."""
        settings = self.training.settings("kinds", {}, seed)
        settings["removals"] = plain(REMOVALS)
        path, arrays_path = self.training.paths(settings)
        result, arrays = read_result(path, settings), read_arrays(arrays_path)
        if result is None or set(arrays or ()) != ARRAYS:
            result, arrays = self.measure(seed)
            write_arrays(arrays_path, arrays)
            write_json(path, {"settings": settings, "result": result})
        return result, arrays

    def measure(self, seed: int) -> tuple[dict, dict]:
        """Trains from a seed; removes kinds, and counts who serves which patch."""
        model, (images, labels), _ = self.training.fit({}, seed)
        batch_size = self.training.args.batch_size
        found = analysis.ablate_experts(
            model, images, labels, "all", REMOVALS, batch_size=batch_size, verbose=0
        )

        def share(by_class):
            return float((by_class * found.counts).sum() / len(labels))

        backbone = model.backbone
        routing = keras.Model(model.input, model.routing).predict(
            images, batch_size=batch_size, verbose=0
        )
        maps = {
            kind: analysis.compute_map(
                routing, backbone.expert_kinds, backbone.grid, kind
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
        result = {
            "whole": share(found.accuracy),
            "without": dict(zip(found.experts.tolist(), map(share, found.ablated))),
            "per_patch": by_patch,
            "plain_patches": float(is_plain.mean()),
        }
        kept = {kind: maps[kind][chosen] for kind in IN_PLACE}
        return plain(result), {"images": images[chosen], **kept}

    def removal(self, runs: list[dict]) -> dict:
        """Table C: accuracies with all kinds, and without some."""
        return {
            "whole": spread([run["whole"] for run in runs]),
            "without": {
                name: spread([run["without"][name] for run in runs])
                for name in runs[0]["without"]
            },
        }

    def tokens(self, runs: list[dict]) -> dict:
        """Figure A: how many experts of each kind a patch meets."""
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

    def draw(self, console: Console) -> None:
        """The picture of the first seed's images."""
        _, arrays = self.one(0)
        path = self.training.args.output / "kinds.png"
        maps = {kind: arrays[kind] for kind in IN_PLACE}
        plots.plot_kind_maps(
            arrays["images"], maps, path, title="Zero-computation experts per token"
        )
        console.print(f"picture   {path}")


def deviation_of_patches(images: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The standard deviation of the pixels of each patch, (B, rows, columns)."""
    count, height, width, channels = images.shape
    size = (height // grid[0], width // grid[1])
    patches = images.reshape(count, grid[0], size[0], grid[1], size[1], channels)
    return patches.std(axis=(2, 4, 5))


def constant_experts(training: Any, counts: list[int], console: Console) -> dict:
    """Figure 3: as many constant experts as given, all else as it is."""
    training.configurations = {
        f"{count} constant": {"constant_experts": count} for count in counts
    }
    rows = training.run(console)["rows"]
    own = ("test_accuracy", "ffn_experts_per_token")
    return {
        str(count): {name: row[name] for name in own}
        for count, row in zip(counts, rows.values())
    }


def print_removal(found: dict, console: Console) -> None:
    table = Table(title="Kinds of experts removed after training (Table C)")
    table.add_column("removed")
    table.add_column("accuracy %", justify="right")
    table.add_row("none", percent(found["whole"]))
    for name, value in found["without"].items():
        table.add_row(name, percent(value))
    console.print(table)


def print_tokens(found: dict, console: Console) -> None:
    table = Table(
        title="Experts that serve a patch "
        f"({found['plain_patches']:.0%} of the patches are plain; Figure A)"
    )
    table.add_column("kind")
    for patch in PATCHES:
        table.add_column(patch, justify="right")
    for kind, row in found["per_patch"].items():
        cells = (f"{row[p]['mean']:.2f}±{row[p]['std']:.2f}" for p in PATCHES)
        table.add_row(kind, *cells)
    console.print(table)


def print_constants(found: dict, console: Console) -> None:
    table = Table(title="Constant experts beside a zero and a copy expert (Figure 3)")
    for column in ("constant experts", "accuracy %", "FFN per token"):
        table.add_column(column, justify="right")
    for count, row in found.items():
        per_token = row["ffn_experts_per_token"]["mean"]
        table.add_row(count, percent(row["test_accuracy"]), f"{per_token:.3f}")
    console.print(table)


def percent(value: dict) -> str:
    return f"{100 * value['mean']:.2f}±{100 * value['std']:.2f}"
