"""Parts of the study of muMoE about its heads: Figures 20, 21, 23 and 24.

All heads of a seed learn from the features of one dense ViT, which stays as it is.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from rich.console import Console

from keras_moe import analysis
from keras_moe.layers import MuMoE
from tools.studies import plots as study_plots
from tools.studies.mumoe_models import DenseModels, Fit
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    new_table,
    percent,
    plus_minus,
    spread,
    spread_of,
)

CLASSES = 100
# Heads of features learn in few, large steps.
BATCH_SIZE, RATE = 256, 2.0
# For Figure 24: experts of the factorised heads, their ranks, and others' experts.
CAPACITY_EXPERTS = 16
CAPACITIES = {
    "CP": [{"factorization": "cp", "rank": r} for r in (16, 64, 256)],
    "TR": [{"factorization": "tr", "rank": (4, 4, r)} for r in (4, 16, 64)],
    "dense": [2, 4, 8],
    "sparse": [2, 4, 8],
}


@keras.saving.register_keras_serializable("mumoe_study")
def top_1_softmax(logits: Any) -> Any:
    """A softmax of which the largest alone is left: a sparse mixture's gates."""
    gates = ops.softmax(logits, axis=-1)
    largest = ops.max(gates, axis=-1, keepdims=True)
    return ops.where(gates >= largest, gates, 0.0)


class Heads:
    """Heads on the features of dense ViTs."""

    def __init__(self, study: Study, dense: DenseModels, fit: Fit):
        self.study, self.dense = study, dense
        self.fit = fit._replace(batch_size=BATCH_SIZE)
        self.features = {}

    def finish_all(
        self, rows: dict[str, dict | None], is_ablated: bool
    ) -> dict[str, list[dict]]:
        """The results of heads by name, one for each seed."""
        settings = {"ablated": is_ablated, "steps": [BATCH_SIZE, RATE]}
        runs = []
        for seed in range(self.dense.seeds):
            for name, options in rows.items():
                # Not the name in a part: rows that two parts share are one run.
                train = functools.partial(self.train, options, is_ablated, seed)
                own = {**settings, "head": options}
                runs.append(Run("head", seed, own, train, label=f"head: {name}"))
        results = self.study.finish_all(runs)
        return {row.removeprefix("head: "): x for row, x in results.items()}

    def train(
        self, options: dict | None, is_ablated: bool, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """Trains a head, and measures how good it is and what its experts do."""
        (_, train_labels), (images, labels) = self.dense.images
        train, test = self.features_of(seed, on_progress)
        keras.utils.set_random_seed(seed)
        whole, inputs = None, keras.Input(train.shape[1:])
        if options is None:
            head = keras.layers.Dense(CLASSES)
            model = keras.Model(inputs, head(inputs))
        else:
            head = new_head(options)
            if is_ablated:
                whole = self.dense.new_model(seed, head=head)
                whole.backbone.set_weights(self.dense.weights(seed, on_progress))
                head = whole.head
            model = keras.Model(inputs, head(inputs)[0])
            if options.get("factorization", "cp") is None:
                # From zeros a sparse gate would choose one expert for all.
                for kernel in head.gate.kernels:
                    draw = keras.initializers.LecunNormal(seed=seed)
                    kernel.assign(draw(kernel.shape))
        model.compile(
            self.fit.optimizer(RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
        self.fit.train(model, train, train_labels, on_progress)
        loss, accuracy = model.evaluate(test, labels, verbose=0)
        result = {
            "loss": loss,
            "accuracy": accuracy,
            "parameters": sum(math.prod(w.shape) for w in head.trainable_weights),
        }
        if options is not None:
            result["expert_rank"] = head.experts.expert_rank_bound
        if is_ablated:
            ablation = analysis.ablate_experts(whole, images, labels, verbose=0)
            result["polysemanticity"] = ablation.mean_polysemanticity
            result["matter"] = int((ablation.changes != 0).any(axis=1).sum())
        return result, {}

    def features_of(
        self, seed: int, on_progress: OnProgress
    ) -> tuple[np.ndarray, np.ndarray]:
        """The features that the dense ViT of a seed gives to a head."""
        if seed not in self.features:
            model = self.dense.new_model(seed)
            model.backbone.set_weights(self.dense.weights(seed, on_progress))
            features = keras.Model(model.input, model.features)
            self.features[seed] = tuple(
                features.predict(images, verbose=0) for images, _ in self.dense.images
            )
        return self.features[seed]


def new_head(options: dict) -> MuMoE:
    """A muMoE head, whose activation may be `top_1_softmax`."""
    options = dict(options)
    if options.get("activation") == "top_1_softmax":
        options["activation"] = top_1_softmax
    return MuMoE(CLASSES, **options)


class AblatedHeads(Part):
    """CP muMoE heads that differ in one argument, and whose experts are ablated."""

    name: str
    values: dict[str, Any]
    figure: int

    def __init__(self, study: Study, heads: Heads, experts: Sequence[int], rank: int):
        super().__init__(study)
        self.heads = heads
        # Spelled out, so that what two parts have in common is one run.
        options = {"rank": rank, "activation": "entmax", "normalization": "batch"}
        self.rows = {
            f"{label}, {count}": {"num_experts": count, **options, self.name: value}
            for label, value in self.values.items()
            for count in experts
        }

    def results(self) -> dict:
        return self.heads.finish_all(self.rows, is_ablated=True)

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"CP muMoE heads (Figure {self.figure})",
            *("head", "accuracy %", "polysemanticity", "experts that matter"),
        )
        for name, runs in results.items():
            scores = [run["polysemanticity"] for run in runs]
            scores = [score for score in scores if score is not None]
            table.add_row(
                name,
                percent(spread_of(runs, "accuracy")),
                plus_minus(spread(scores), 3) if scores else "-",
                f"{np.mean([run['matter'] for run in runs]):.1f}",
            )
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        scores = by_count(every[self.name], "polysemanticity")
        if not scores:
            # After few steps no expert may matter.
            return []
        path = self.study.folder / f"{self.name}.png"
        title = f"Polysemanticity by {self.name}"
        study_plots.plot_polysemanticity(scores, path, title=title)
        return [path]


class Activation(AblatedHeads):
    """Figure 20."""

    name, figure = "activation", 20
    values = {"entmax": "entmax", "softmax": "softmax"}


class Normalization(AblatedHeads):
    """Figure 21."""

    name, figure = "normalization", 21
    values = {"batch norm": "batch", "none": None}


class ComparedHeads(Part):
    """Heads of different kinds, beside a linear one."""

    figure: int

    def __init__(self, study: Study, heads: Heads, rows: dict[str, dict]):
        super().__init__(study)
        self.heads, self.rows = heads, {"linear": None, **rows}

    def results(self) -> dict:
        return self.heads.finish_all(self.rows, is_ablated=False)

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"Heads (Figure {self.figure})",
            *("head", "parameters", "rank", "loss", "accuracy %"),
        )
        for name, runs in results.items():
            table.add_row(
                name,
                f"{runs[0]['parameters']:,}",
                str(runs[0].get("expert_rank", "-")),
                plus_minus(spread_of(runs, "loss"), 3),
                percent(spread_of(runs, "accuracy")),
            )
        console.print(table)


class Matched(ComparedHeads):
    """Figure 23, and Tucker, which the paper does not train."""

    figure = 23

    def __init__(self, study: Study, heads: Heads, experts: Sequence[int]):
        rows = {
            f"{label}, {count}": {"num_experts": count, "factorization": kind}
            for kind, label in (("cp", "CP"), ("tr", "TR"), ("tucker", "Tucker"))
            for count in experts
        }
        super().__init__(study, heads, rows)

    def draw(self, every: dict) -> list[Path]:
        results, path = every["matched"], self.study.folder / "matched.png"
        linear = np.mean([run["loss"] for run in results["linear"]])
        ranks = {
            name: {count: values[0] for count, values in rows.items()}
            for name, rows in by_count(results, "expert_rank").items()
        }
        losses = {
            name: {count: spread(values) for count, values in rows.items()}
            for name, rows in by_count(results, "loss").items()
        }
        study_plots.plot_matched_heads(losses, ranks, linear, path)
        return [path]


class Capacity(ComparedHeads):
    """Figure 24."""

    figure = 24

    def __init__(self, study: Study, heads: Heads):
        rows = {}
        for name, sizes in CAPACITIES.items():
            for size in sizes:
                if isinstance(size, dict):
                    options = {"num_experts": CAPACITY_EXPERTS, **size}
                    rows[f"{name}, {size['rank']}"] = options
                else:
                    activation = "softmax" if name == "dense" else "top_1_softmax"
                    options = {"num_experts": size, "factorization": None}
                    options |= {"activation": activation, "normalization": None}
                    rows[f"{name}, {size}"] = options
        super().__init__(study, heads, rows)

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / "capacity.png"
        study_plots.plot_head_capacity(by_parameters(every["capacity"]), path)
        return [path]


def by_count(results: dict, what: str) -> dict[str, dict[int, list[float]]]:
    """Values of runs by the word before the comma, and the number behind it."""
    values = {}
    for name, runs in results.items():
        own = [run[what] for run in runs if run.get(what) is not None]
        if "," in name and own:
            kind, count = name.split(",")
            values.setdefault(kind, {})[int(count)] = own
    return values


def by_parameters(results: dict) -> dict[str, dict[int, dict]]:
    """Spreads of the accuracies of runs by kind of head and number of parameters."""
    values = {}
    for name, runs in results.items():
        rows = values.setdefault(name.split(",")[0], {})
        rows[runs[0]["parameters"]] = spread_of(runs, "accuracy")
    return values
