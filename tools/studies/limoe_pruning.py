"""The part of the study of LIMoE about pruned experts: Figures 13, 14 and 15.

Axes: E experts, K selected experts.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import analysis, evaluation, training
from keras_moe.analysis import plots
from tools.studies import plots as study_plots
from tools.studies.pairs import PairTraining, retrieval_figures
from tools.studies.study import OnProgress, Part, Run, Study, percent, spread

METHODS = ("router_drop", "router_pred", "router_pred_skip")
MODALITIES = ("text", "image")
# The experts are ranked by the last fifth of the steps, counted at so many times.
LAST_SHARE, TIMES = 5, 10
# Batches of training pairs that are routed in turn.
BATCHES = 8


class Pruning(Part):
    """LIMoEs of two text thresholds, whose experts are pruned for one modality."""

    def __init__(
        self,
        study: Study,
        pairs: PairTraining,
        configurations: dict[str, dict[str, Any]],
        counts: Sequence[int],
        seeds: int,
    ):
        super().__init__(study)
        self.pairs, self.counts = pairs, list(counts)
        self.runs = [
            self.new_run(name, overrides, seed)
            for seed in range(seeds)
            for name, overrides in configurations.items()
        ]

    def new_run(self, name: str, overrides: dict, seed: int) -> Run:
        """The run of a configuration from a seed."""
        settings = {
            "overrides": overrides,
            "counts": self.counts,
            "methods": METHODS,
            "usage": [LAST_SHARE, TIMES, BATCHES],
            "coverage": "first_choices",
        }
        make = functools.partial(self.measure, overrides, seed)
        return Run("pruning", seed, settings, make, name)

    def measure(
        self, overrides: dict, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """Trains from a seed, and prunes the experts of each modality by their use."""
        recorders = []

        def recorder(model, datasets):
            steps = self.pairs.recipe.replace(**overrides).total_steps(
                datasets.steps_per_epoch
            )
            last = max(1, steps // LAST_SHARE)
            every = max(1, last // TIMES)
            recorders.append(
                training.UsageRecorder(
                    first_batches(datasets.train, BATCHES),
                    every=every,
                    last=last,
                    batch_size=self.pairs.recipe.data.batch_size,
                )
            )
            return recorders[0]

        model, result = self.pairs.train(
            overrides, seed, on_progress, callbacks=[recorder]
        )
        usage = recorders[0].usage
        on_progress("pruning")
        result["pruned"] = self.pruned(model, usage)
        result["coverage"] = {
            modality: {
                name: curve.covered.tolist()
                for name, curve in analysis.coverage_curves(
                    usage, "first_choices", modality
                ).items()
            }
            for modality in MODALITIES
        }
        return result, {}

    def pruned(self, model: keras.Model, usage: Any) -> dict:
        """R@1 of test pairs, the mean of both ways, by modality, method and experts."""
        recipe = self.pairs.recipe
        embedded = functools.partial(
            evaluation.encode_pairs,
            pairs=self.pairs.test_pairs(recipe, model),
            batch_size=recipe.data.batch_size,
        )
        whole = embedded(model)

        def recall(modality, method, count):
            keep = analysis.select_experts(usage, count, groups=modality)
            masked = embedded(
                analysis.prune_experts(model, keep, method, removed=False)
            )
            # The other modality has all its experts.
            name = f"{modality}s"
            both = whole._replace(**{name: getattr(masked, name)})
            return retrieval_figures(both)["r1"]

        return {
            modality: {
                method: {
                    str(count): recall(modality, method, count) for count in self.counts
                }
                for method in METHODS
            }
            for modality in MODALITIES
        }

    def results(self) -> dict:
        rows = self.study.finish_all(self.runs)
        return {"rows": {name: pruning_summary(runs) for name, runs in rows.items()}}

    def show(self, results: dict, console: Console) -> None:
        table = Table(title="R@1 in % with fewer experts (Figures 14 and 15)")
        for column in ("model", "pruned", "routers"):
            table.add_column(column)
        for count in self.counts:
            table.add_column(f"{count} left", justify="right")
        for name, row in results["rows"].items():
            for modality, methods in row["pruned"].items():
                for method, curve in methods.items():
                    cells = [percent(curve[str(count)]) for count in self.counts]
                    table.add_row(name, modality, method, *cells)
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        rows = every["pruning"]["rows"]
        paths = [self.study.folder / name for name in ("coverage.png", "pruning.png")]
        plots.plot_coverage(
            {
                f"{modality}, {name}": {
                    block: analysis.CoverageCurve(np.arange(len(x)), np.array(x))
                    for block, x in row["coverage"][modality].items()
                }
                for modality in MODALITIES
                for name, row in rows.items()
            },
            paths[0],
        )
        curves = {name: row["pruned"] for name, row in rows.items()}
        study_plots.plot_pruned_pairs(curves, paths[1])
        return paths


def kept_counts(num_experts: int, num_selected: int) -> list[int]:
    """Numbers of experts that are left: powers of two, three quarters, and all."""
    powers = (2**power for power in range(num_experts.bit_length()))
    counts = {num_selected, 3 * num_experts // 4, num_experts, *powers}
    return sorted(x for x in counts if num_selected <= x <= num_experts)


def pruning_summary(runs: Sequence[dict]) -> dict:
    """Means and spreads over the runs of a model."""
    first = runs[0]
    return {
        "seeds": len(runs),
        "pruned": {
            modality: {
                method: {
                    count: spread([x["pruned"][modality][method][count] for x in runs])
                    for count in curve
                }
                for method, curve in methods.items()
            }
            for modality, methods in first["pruned"].items()
        },
        # By rank: seeds have other experts.
        "coverage": {
            modality: {
                block: np.mean(
                    [x["coverage"][modality][block] for x in runs], 0
                ).tolist()
                for block in blocks
            }
            for modality, blocks in first["coverage"].items()
        },
    }


def first_batches(batches: Any, count: int) -> dict[str, np.ndarray]:
    """The inputs of the first batches, together."""
    inputs = [pair[0] for pair, _ in zip(batches, range(count))]
    return {name: np.concatenate([x[name] for x in inputs]) for name in inputs[0]}
