"""The part of the study of muMoE about polysemanticity: Figures 2, 3, 7, 18, 19, 22."""

import functools
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import analysis, models
from keras_moe.analysis import plots
from keras_moe.layers import MuMoE
from keras_moe.ops import Routing
from tools.studies import plots as study_plots
from tools.studies.mumoe_digits import SHAPE, SIZES, Fit, numbers
from tools.studies.study import (
    Part,
    Run,
    Study,
    Tell,
    percent,
    plus_minus,
    spread,
)
from tools.studies.truncated_svd import TruncatedSVD, truncated_svd

# Examples of the 100 numbers.
TRAIN_NUMBERS, TEST_NUMBERS = 6000, 2000
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


class DenseModels:
    """A dense ViT for each seed, from which heads start, and its images."""

    def __init__(self, study: Study, fit: Fit, seeds: int):
        self.study, self.fit, self.seeds = study, fit, seeds
        settings = {"numbers": [TRAIN_NUMBERS, TEST_NUMBERS]}
        self.runs = [
            Run("dense", seed, settings, functools.partial(self.train, seed))
            for seed in range(seeds)
        ]

    @functools.cached_property
    def images(self) -> tuple[tuple, tuple]:
        """Images and labels to train on, and to test."""
        return numbers("train", TRAIN_NUMBERS), numbers("test", TEST_NUMBERS)

    def new_model(self, seed: int, **head) -> keras.Model:
        """A ViT with any head."""
        keras.utils.set_random_seed(seed)
        shape = (SHAPE[0], 2 * SHAPE[1], SHAPE[2])
        backbone = models.ViTBackbone(shape, num_heads=4, seed=seed, **SIZES)
        return models.ViTImageClassifier(backbone, 100, **head)

    def train(self, seed: int, tell: Tell) -> tuple[dict, dict]:
        """Trains from a seed, and keeps the backbone's weights."""
        train, test = self.images
        model = self.new_model(seed)
        model.compile(optimizer=self.fit.optimizer())
        self.fit.train(model, *train, tell)
        svd = truncated_svd(model, *test, shares=SHARES)
        weights = model.backbone.get_weights()
        arrays = {f"w{index}": value for index, value in enumerate(weights)}
        return {"accuracy": svd.full, "svd": svd._asdict()}, arrays

    def weights(self, seed: int, tell: Tell) -> list[np.ndarray]:
        """The backbone's weights of a seed, trained if they are not there."""
        self.study.finish(self.runs[seed], tell)
        arrays = self.study.arrays(self.runs[seed])
        return [arrays[f"w{index}"] for index in range(len(arrays))]


class Specialisation(Part):
    """Polysemanticity by the number of experts."""

    def __init__(
        self,
        study: Study,
        dense: DenseModels,
        experts: Sequence[int],
        rank: int,
        positions: Sequence[str],
    ):
        super().__init__(study)
        self.dense, self.rank = dense, rank
        settings = {"rank": rank, "numbers": [TRAIN_NUMBERS, TEST_NUMBERS]}
        self.heads = [
            Run(
                f"{place} {count}",
                seed,
                settings,
                functools.partial(self.head, place, count, seed),
            )
            for seed in range(dense.seeds)
            for place in positions
            for count in experts
        ]

    def head(self, place: str, count: int, seed: int, tell: Tell) -> tuple[dict, dict]:
        """The ViT with a muMoE head, trained on together."""
        weights, (train, test) = self.dense.weights(seed, tell), self.dense.images
        units = 100 if place == "final" else SIZES["hidden_dim"]
        head = MuMoE(units, count, rank=self.rank)
        model = self.dense.new_model(seed, head=head, head_position=place)
        model.backbone.set_weights(weights)
        fit = self.dense.fit
        model.compile(optimizer=fit.optimizer(0.5))
        fit.train(model, *train, tell)
        ablation = analysis.ablate_experts(model, *test, verbose=0)
        score = ablation.mean_polysemanticity
        if score is None:
            raise ValueError(
                f"Expected an expert that matters; received: none of {count} after "
                f"{fit.epochs} epochs. Try more --epochs"
            )
        routing = keras.Model(model.input, model.routing["head"])
        gates = routing.predict(test[0], verbose=0).gates
        correct = (ablation.accuracy * ablation.counts).sum()
        result = {
            "accuracy": float(correct / len(test[1])),
            "polysemanticity": score,
            "matter": int((ablation.changes != 0).any(axis=1).sum()),
            "per_image": float((gates > 0).sum(axis=-1).mean()),
        }
        return result, {"gates": gates, **ablation._asdict()}

    def results(self) -> dict:
        runs = [*self.dense.runs, *self.heads]
        by_name = {}
        for run, result in zip(runs, self.study.finish_all(runs)):
            by_name.setdefault(run.name, []).append(result)
        dense = by_name.pop("dense")
        return {
            "dense": {"accuracy": spread([row["accuracy"] for row in dense])},
            "svd": dense[0]["svd"],
            "heads": {
                name: {
                    "accuracy": spread([run["accuracy"] for run in runs]),
                    "polysemanticity": [run["polysemanticity"] for run in runs],
                    "experts_that_matter": spread([run["matter"] for run in runs]),
                    "experts_per_image": spread([run["per_image"] for run in runs]),
                }
                for name, runs in by_name.items()
            },
        }

    def show(self, results: dict, console: Console) -> None:
        table = Table(title="Numbers from 00 to 99: CP muMoE heads (Figure 3)")
        columns = ("accuracy %", "polysemanticity", "experts that matter")
        for column in ("head", *columns, "experts per image"):
            table.add_column(column, justify=None if column == "head" else "right")
        table.add_row("dense", percent(results["dense"]["accuracy"]), "", "", "")
        for name, row in results["heads"].items():
            table.add_row(
                name,
                percent(row["accuracy"]),
                plus_minus(spread(row["polysemanticity"])),
                f"{row['experts_that_matter']['mean']:.1f}",
                f"{row['experts_per_image']['mean']:.1f}",
            )
        console.print(table)
        console.print(TruncatedSVD(**results["svd"]).table())

    def draw(self, every: dict) -> list[Path]:
        """Pictures of the first seed's heads, and polysemanticity of all seeds."""
        results, folder = every["specialisation"], self.study.folder
        scores, ablations, loads = {}, {}, {}
        for run in self.heads:
            if run.seed:
                continue
            arrays = self.study.arrays(run)
            place, count = run.name.split()
            own = results["heads"][run.name]["polysemanticity"]
            scores.setdefault(f"{place} layer", {})[int(count)] = own
            fields = analysis.ExpertAblation._fields
            ablations[f"{run.name} experts"] = analysis.ExpertAblation(
                **{field: arrays[field] for field in fields}
            )
            record = Routing(*[arrays["gates"]] * len(Routing._fields))
            loads[f"{run.name} experts"] = analysis.expert_load(record)
        paths = {
            name: folder / f"{name}.png"
            for name in ("polysemanticity", "ablation", "load", "svd", "images")
        }
        svd = TruncatedSVD(**results["svd"])
        plots.plot_polysemanticity(scores, paths["polysemanticity"])
        plots.plot_ablation(ablations, paths["ablation"])
        plots.plot_expert_load(loads, paths["load"])
        study_plots.plot_truncated_svd(svd, paths["svd"])
        # Those of the last head; after few steps no coefficient may be that large.
        if not (record.gates >= 0.5).any():
            paths.pop("images")
        else:
            images, labels = self.dense.images[1]
            labels = [f"{label:02d}" for label in labels]
            title = f"Images of each expert: {run.name} experts"
            plots.plot_expert_images(
                images, record, paths["images"], labels, title=title
            )
        return list(paths.values())
