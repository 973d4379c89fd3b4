"""Parts of the study of muMoE about its heads: Table 8, Figures 20, 21, 23 and 24.

All heads of a seed learn from the features of one dense ViT, which stays as it is.
"""

import math
from typing import Any

import keras
import numpy as np
from keras import ops
from results import check_converged, spread
from rich.console import Console
from rich.table import Table

from keras_moe import analysis
from keras_moe.analysis import plots
from keras_moe.layers import MultilinearExperts, MuMoE

PARTS = ("activation", "normalization", "matched", "capacity")
CLASSES = 100
# Heads of features learn in few, large steps.
BATCH_SIZE, RATE = 256, 2.0
# Table 8: experts, inputs and units, ranks, and what the paper prints.
TABLE_8 = (512, 768, 768)
PRINTED = {
    "CP": ("cp", 512, "155.1B", "1.4M"),
    "TR": ("tr", (4, 4, 512), "622.8B", "3.5M"),
}
# Of Figure 24: experts of the factorised heads, their ranks, and others' experts.
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
    """Heads on the features of a dense ViT, each trained once.

    Args:
        study: the `Specialisation` whose dense models, numbers and files they share.
        train: images and labels.
        test: images and labels.
    """

    def __init__(self, study: Any, train: tuple, test: tuple):
        self.study, self.train, self.test = study, train, test
        self.features = {}

    def run(self, part: str, progress: Any) -> dict:
        """The results of a part of `PARTS`."""
        args = self.study.args
        rows = getattr(self, part)()
        task = progress.add_task("runs", total=args.seeds * len(rows))
        results = {}
        for seed in range(args.seeds):
            for name, (options, is_ablated) in rows.items():
                progress.update(task, description=f"{part}: {name}, seed {seed}")
                found = self.one(options, is_ablated, seed)
                results.setdefault(name, []).append(found)
                progress.advance(task)
        return results

    # What each part compares: by name, the arguments of a head, None for a linear one,
    # and whether its experts are ablated.

    def activation(self) -> dict:
        """Figure 20."""
        return self._ablated("activation", {"entmax": "entmax", "softmax": "softmax"})

    def normalization(self) -> dict:
        """Figure 21."""
        return self._ablated("normalization", {"batch norm": "batch", "none": None})

    def _ablated(self, argument, values):
        args = self.study.args
        # Spelled out, so that what two parts have in common is one run.
        options = {"rank": args.rank, "activation": "entmax", "normalization": "batch"}
        return {
            f"{name}, {count}": (
                {"num_experts": count, **options, argument: value},
                True,
            )
            for name, value in values.items()
            for count in args.experts
        }

    def matched(self) -> dict:
        """Figure 23, and Tucker, which the paper does not train."""
        rows = {"linear": (None, False)}
        for kind in ("cp", "tr", "tucker"):
            for count in self.study.args.experts:
                name = f"{kind.upper() if len(kind) < 3 else 'Tucker'}, {count}"
                rows[name] = ({"num_experts": count, "factorization": kind}, False)
        return rows

    def capacity(self) -> dict:
        """Figure 24."""
        rows = {"linear": (None, False)}
        for name, sizes in CAPACITIES.items():
            for size in sizes:
                if isinstance(size, dict):
                    options = {"num_experts": CAPACITY_EXPERTS, **size}
                    label = f"{name}, {size['rank']}"
                else:
                    activation = "softmax" if name == "dense" else "top_1_softmax"
                    options = {"num_experts": size, "factorization": None}
                    options |= {"activation": activation, "normalization": None}
                    label = f"{name}, {size}"
                rows[label] = (options, False)
        return rows

    def one(self, options: dict | None, is_ablated: bool, seed: int) -> dict:
        """One head's result, of its file where there is one."""
        study = self.study
        settings = {"run": "head", "seed": seed, "head": options}
        settings |= {"ablated": is_ablated, "numbers": len(self.test[1])}
        settings["steps"] = [BATCH_SIZE, RATE]
        result, _ = study.once(
            settings, lambda: (self.fit(options, is_ablated, seed), {})
        )
        return result

    def fit(self, options: dict | None, is_ablated: bool, seed: int) -> dict:
        """Trains a head, and says how good it is and what its experts do."""
        study = self.study
        train, test = self.features_of(seed)
        keras.utils.set_random_seed(seed)
        model, whole = None, None
        inputs = keras.Input(train.shape[1:])
        if options is None:
            head = keras.layers.Dense(CLASSES)
            model = keras.Model(inputs, head(inputs))
        else:
            given = dict(options)
            if given.get("activation") == "top_1_softmax":
                given["activation"] = top_1_softmax
            head = MuMoE(CLASSES, **given)
            if is_ablated:
                whole = study.model(seed, head=head)
                whole.backbone.set_weights(self.dense_weights(seed))
                head = whole.head
            model = keras.Model(inputs, head(inputs)[0])
            if given.get("factorization", "cp") is None:
                # Of zeros a sparse gate would choose one expert for all.
                for kernel in head.gate.kernels:
                    draw = keras.initializers.LecunNormal(seed=seed)
                    kernel.assign(draw(kernel.shape))
        self.learn(model, train)
        loss, accuracy = model.evaluate(test, self.test[1], verbose=0)
        result = {
            "loss": loss,
            "accuracy": accuracy,
            "parameters": sum(math.prod(w.shape) for w in head.trainable_weights),
        }
        if options is not None:
            result["expert_rank"] = head.experts.expert_rank_bound
        if is_ablated:
            found = analysis.ablate_experts(whole, *self.test, verbose=0)
            result["polysemanticity"] = found.mean_polysemanticity
            result["matter"] = int((found.changes != 0).any(axis=1).sum())
        return result

    def learn(self, model: keras.Model, features: np.ndarray) -> None:
        """Trains a head on features."""
        args = self.study.args
        model.compile(
            keras.optimizers.AdamW(RATE * args.learning_rate, weight_decay=1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
        history = model.fit(
            features,
            self.train[1],
            batch_size=BATCH_SIZE,
            epochs=args.epochs,
            verbose=0,
        )
        check_converged(history.history)

    def dense_weights(self, seed: int) -> list:
        """Those of the backbone of the dense ViT of a seed."""
        _, weights = self.study.dense_once(self.train, self.test, seed)
        return [weights[f"w{i}"] for i in range(len(weights))]

    def features_of(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """What the dense ViT of a seed gives to a head, in training and test."""
        if seed not in self.features:
            model = self.study.model(seed)
            model.backbone.set_weights(self.dense_weights(seed))
            features = keras.Model(model.input, model.features)
            self.features[seed] = tuple(
                features.predict(images, verbose=0)
                for images, _ in (self.train, self.test)
            )
        return self.features[seed]

    def report(self, part: str, found: dict, console: Console) -> None:
        """A table and a picture."""
        path = self.study.args.output / f"{part}.png"
        if part in ("activation", "normalization"):
            figure = 20 if part == "activation" else 21
            print_ablated(found, f"CP muMoE heads (Figure {figure})", console)
            scores = by_count(found, "polysemanticity")
            if not scores:
                # After few steps no expert may matter.
                return
            title = f"Polysemanticity by {part}"
            plots.plot_polysemanticity(scores, path, title=title)
        else:
            figure = 23 if part == "matched" else 24
            print_heads(found, f"Heads (Figure {figure})", console)
            if part == "matched":
                losses = by_count(found, "loss")
                linear = [run["loss"] for run in found["linear"]]
                ranks = {
                    name: {count: values[0] for count, values in rows.items()}
                    for name, rows in by_count(found, "expert_rank").items()
                }
                plots.plot_matched_heads(losses, ranks, linear, path)
            else:
                plots.plot_head_capacity(by_parameters(found), path)
        console.print(f"picture   {path}")


def by_count(found: dict, what: str) -> dict[str, dict[int, list[float]]]:
    """Values of runs by what stands before the comma, and the number behind it."""
    values = {}
    for name, runs in found.items():
        own = [run[what] for run in runs if run.get(what) is not None]
        if "," in name and own:
            kind, count = name.split(",")
            values.setdefault(kind, {})[int(count)] = own
    return values


def by_parameters(found: dict) -> dict[str, dict[int, list[float]]]:
    """Accuracies of runs by kind of head and number of parameters."""
    values = {}
    for name, runs in found.items():
        rows = values.setdefault(name.split(",")[0], {})
        rows[runs[0]["parameters"]] = [run["accuracy"] for run in runs]
    return values


def costs() -> dict:
    """Table 8: multiply-adds of one token, by the whole tensor and in factors."""
    experts, inputs, units = TABLE_8
    rows = {}
    for name, (kind, rank, *printed) in PRINTED.items():
        layer = MultilinearExperts(units, experts, kind, rank)
        gate = MuMoE(units, experts, kind, rank).gate.cost((1, inputs)).parameters
        rows[name] = {
            "naive": gate + layer.naive_multiply_adds(inputs),
            "factorized": gate + layer.multiply_adds(inputs),
            "printed": printed,
        }
    return rows


def print_costs(found: dict, console: Console) -> None:
    table = Table(
        title="Multiply-adds, {} experts on {} inputs and {} units (Table 8)".format(
            *TABLE_8
        )
    )
    table.add_column("layer")
    for column in ("naive", "paper", "factorized", "paper", "naive / factorized"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['naive'] / 1e9:.1f}B",
            row["printed"][0],
            f"{row['factorized'] / 1e6:.2f}M",
            row["printed"][1],
            f"{row['naive'] / row['factorized']:,.0f}",
        )
    console.print(table)


def print_ablated(found: dict, title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("head")
    for column in ("accuracy %", "polysemanticity", "experts that matter"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        scores = [run["polysemanticity"] for run in runs]
        scores = [score for score in scores if score is not None]
        table.add_row(
            name,
            _percent(runs),
            _plus_minus(scores) if scores else "-",
            f"{np.mean([run['matter'] for run in runs]):.1f}",
        )
    console.print(table)


def print_heads(found: dict, title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("head")
    for column in ("parameters", "rank", "loss", "accuracy %"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        table.add_row(
            name,
            f"{runs[0]['parameters']:,}",
            str(runs[0].get("expert_rank", "-")),
            _plus_minus([run["loss"] for run in runs]),
            _percent(runs),
        )
    console.print(table)


def _percent(runs):
    value = spread([run["accuracy"] for run in runs])
    return f"{100 * value['mean']:.1f}±{100 * value['std']:.1f}"


def _plus_minus(values):
    value = spread(values)
    return f"{value['mean']:.3f}±{value['std']:.3f}"
