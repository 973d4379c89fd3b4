"""Image-text models in studies: their training by a recipe, figures and tables.

Axes: B pairs, N tokens, E experts.
"""

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_moe import analysis, data, evaluation, training
from keras_moe.analysis.usage import routing_usage
from keras_moe.cli._arguments import Result, add_count, add_data, add_overrides
from keras_moe.cli.train import backend_and_versions
from keras_moe.training._upcycled import copy_weights
from tools.studies import plots
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    Watch,
    add_training,
    new_table,
    percent,
    plus_minus,
    run_parts,
    spread,
)

KS = (1, 5)
# Pairs of a batch of the contrastive accuracy, where there are as many.
ACCURACY_BATCH = 1024
# The share of a modality's tokens whose experts are counted, as in LIMoE's Figure 10.
COVERED = 0.9
# The words of `RouterHealth` where a router uses few experts.
COLLAPSED = "has collapsed"
# The titles of columns, the figures in them, and whether they are shares.
COLUMNS = (
    ("I→T R@1", "image_to_text_r1", True),
    ("T→I R@1", "text_to_image_r1", True),
    ("I→T R@5", "image_to_text_r5", True),
    ("T→I R@5", "text_to_image_r5", True),
    ("accuracy", "contrastive_accuracy", True),
    ("text experts", "text_experts", False),
    ("image experts", "image_experts", False),
    ("text dropped", "text_dropped", True),
    ("image dropped", "image_dropped", True),
)
NOTES = (
    "R@1, R@5: retrieval of the test pairs, images to texts and texts to images; "
    "accuracy: a pair's own among 1,024, or all where they are fewer; in %, ± one "
    "standard deviation over the seeds.",
    "experts: those that serve 90% of a modality's tokens, padding left out, at "
    "inference; dropped: tokens that no expert served, routed as in training. Both are "
    "averages over the MoE blocks.",
    "R@1 at start: mean of both ways of an upcycled model, before it trains.",
    "collapsed: runs of which the routers' health says so at their end.",
)


def add_pairs(parser: argparse.ArgumentParser, name: str, recipe: str) -> None:
    """Adds the arguments of studies of pairs."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help="The names of the rows that train; without it, all.",
    )
    parser.add_argument(
        "--recipe",
        default=recipe,
        help="A recipe of pairs: a name or a file.",
    )
    add_data(parser, " Also webdataset:GLOB. The default is the data of the recipe.")
    add_overrides(parser)
    add_overrides(
        parser, "--recipe-set", "settings of the recipe", "data.captions=first"
    )
    add_training(parser, f"{name}_study")
    add_count(parser, "--steps", "The length of a run in steps, instead of --epochs.")


def recipe_of(args: argparse.Namespace) -> training.Recipe:
    """The recipe of a study, with what the command line overrides.

    A shorter run has a shorter warm-up, unless the command line sets it.
    """
    if args.epochs and args.steps:
        raise ValueError(
            "Expected --epochs or --steps; received: "
            f"--epochs {args.epochs} --steps {args.steps}"
        )
    recipe = training.load_recipe(args.recipe)
    if recipe.objective.name != "contrastive":
        raise ValueError(
            "Expected a recipe of pairs, with the objective contrastive; received: "
            f"--recipe {args.recipe} with {recipe.objective.name}"
        )
    options = {
        "data.source": args.data,
        "data.batch_size": args.batch_size,
        "schedule.learning_rate": args.learning_rate,
        "schedule.epochs": args.epochs,
        "schedule.steps": args.steps,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    before, warmup = recipe.schedule, recipe.schedule.warmup_steps
    if args.steps:
        overrides["schedule.warmup_steps"] = min(warmup, args.steps // 10)
    elif args.epochs and before.epochs:
        share = min(1.0, args.epochs / before.epochs)
        overrides["schedule.warmup_steps"] = round(warmup * share)
    overrides |= {f"model.{name}": value for name, value in args.set}
    return recipe.replace(**{**overrides, **dict(args.recipe_set)})


class PairTraining:
    """Models of pairs, trained from seeds by a recipe."""

    def __init__(self, recipe: training.Recipe, data_dir: str | None):
        self.recipe, self.data_dir = recipe, data_dir
        # Each warning is shown once, and not in every run.
        self.warned: set[str] = set()

    def settings(self) -> dict[str, Any]:
        """The settings that influence every run."""
        settings = self.recipe.to_dict()
        for name in ("seed", "description", "reference", "notes"):
            del settings[name]
        return {"recipe": settings, "data_dir": self.data_dir}

    def new_run(self, overrides: dict, seed: int, label: str) -> Run:
        """The run of a configuration from a seed.

        Its name is not that of the configuration: rows that two parts share are one
        run.
        """
        make = functools.partial(self.make, overrides, seed)
        return Run("pairs", seed, {"overrides": overrides}, make, label)

    def make(
        self, overrides: dict, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """Trains and measures; there are no arrays to keep."""
        return self.train(overrides, seed, on_progress)[1], {}

    def train(
        self,
        overrides: dict,
        seed: int,
        on_progress: OnProgress,
        dense: keras.Model | None = None,
        callbacks: list | None = None,
    ) -> tuple[keras.Model, dict]:
        """Trains a model from a seed, and measures it on the test pairs."""
        recipe = self.recipe.replace(**{**overrides, "seed": seed})
        clock, watchers, start = Clock(), {}, {}

        def prepared(model, datasets):
            if dense is not None:
                copy_weights(dense, model, 0.0, 0.0, seed)
                start.update(self.retrieval(recipe, model))
            every = [
                clock,
                Watch(on_progress),
                *(new(model, datasets) for new in callbacks or ()),
            ]
            if model.routing:
                # Routed as in training, once at the end.
                inputs = first_batch(datasets.test)
                watchers["health"] = training.RouterHealth(
                    inputs, every=recipe.passes(datasets.steps_per_epoch)
                )
                watchers["inputs"] = inputs
                every.append(watchers["health"])
            return every

        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained = training.train(
                recipe, data_dir=self.data_dir, callbacks=prepared, verbose=0
            )
        collapsed = [str(x.message) for x in caught if COLLAPSED in str(x.message)]
        for warning in caught:
            text = str(warning.message)
            if COLLAPSED not in text and text not in self.warned:
                self.warned.add(text)
                warnings.warn(warning.message, warning.category, stacklevel=2)
        seconds = time.perf_counter() - begin
        model = trained.model
        figures = self.retrieval(recipe, model)
        layers = []
        if watchers:
            layers = watchers["health"].layers
            figures |= routing_figures(model, watchers["inputs"])
            figures |= health_figures(layers)
            figures["collapsed"] = float(bool(collapsed))
        shares = {layer["layer"]: layer["expert_shares"] for layer in layers}
        return model, {
            "figures": figures,
            "start": start,
            "collapsed": collapsed,
            "expert_shares": shares,
            "history": trained.history,
            "epoch_seconds": clock.median,
            "parameters": model.count_params(),
            "seconds": seconds,
        }

    def retrieval(self, recipe: training.Recipe, model: keras.Model) -> dict:
        """Retrieval of the test pairs by a model."""
        pairs = self.test_pairs(recipe, model)
        embedded = evaluation.encode_pairs(model, pairs, recipe.data.batch_size)
        return retrieval_figures(embedded)

    def test_pairs(self, recipe: training.Recipe, model: keras.Model) -> Any:
        """Batches of all test pairs, each caption of an image with it."""
        return data.load_pairs(
            recipe.data.source,
            recipe.data.test_split,
            model.backbone.image_shape,
            batch_size=recipe.data.batch_size,
            tokenizer=model.preprocessor,
            shuffle=False,
            data_dir=self.data_dir,
            **{**recipe.data.pair_options(), "captions": "all"},
        )


class Clock(keras.callbacks.Callback):
    """The seconds of epochs, of which the first, which compiles, does not count."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])  # Waits for the last step.
        self.seconds.append(time.perf_counter() - self.begin)

    @property
    def median(self) -> float | None:
        """The median, or None after a single epoch."""
        return statistics.median(self.seconds[1:]) if self.seconds[1:] else None


def first_batch(batches: Any) -> dict[str, np.ndarray]:
    """The inputs of the first batch."""
    inputs, *_ = next(iter(batches))
    return {name: np.asarray(value) for name, value in inputs.items()}


def new_study(
    args: argparse.Namespace, pairs: "PairTraining", console: Console
) -> Study:
    """The folder of a study of pairs."""
    settings = {**pairs.settings(), **backend_and_versions()}
    return Study(args.output, settings, console, args.restart)


def retrieval_figures(pairs: evaluation.PairEmbeddings) -> dict[str, float]:
    """Recalls of both directions, and the contrastive accuracy."""
    ks = [k for k in KS if k <= min(len(pairs.images), len(pairs.texts))]
    recalls = pairs.retrieval(ks).figures()
    accuracy = pairs.contrastive_accuracy(min(ACCURACY_BATCH, len(pairs.texts)))
    mean = (recalls["image_to_text_r1"] + recalls["text_to_image_r1"]) / 2
    return {**recalls, "r1": mean, "contrastive_accuracy": accuracy.accuracy}


def routing_figures(model: Any, inputs: dict) -> dict[str, float]:
    """Figures of routers by modality, routed as at inference."""
    records = keras.Model(model.input, model.routing).predict(
        inputs, batch_size=len(inputs["images"]), verbose=0
    )
    masks = {"text": np.asarray(inputs["padding_mask"], bool)}
    return modality_figures(records, masks)


def modality_figures(
    records: dict[str, Any], masks: dict[str, np.ndarray]
) -> dict[str, float]:
    """Entropies of routers and numbers of experts by modality, averaged over blocks."""
    rows: dict[str, list[float]] = {}
    for name, record in records.items():
        modality = name.partition("/")[0]
        mask = masks.get(modality)
        gates = np.asarray(record.gates, "float64")
        gates = gates.reshape(-1, gates.shape[-1]) if mask is None else gates[mask]
        usage = analysis.ExpertUsage(
            [modality], {name: routing_usage(record, mask=mask)}
        )
        curve = analysis.coverage_curves(usage)[name]
        for figure, value in {
            "routing_entropy": entropy(gates.mean(axis=0)),
            "local_entropy": float(np.mean([entropy(row) for row in gates])),
            "experts": float(np.argmax(curve.covered >= COVERED) + 1),
            "max_gate": float(gates.max(axis=-1).mean()),
        }.items():
            rows.setdefault(f"{modality}_{figure}", []).append(value)
    return {name: statistics.fmean(values) for name, values in rows.items()}


def health_figures(layers: list[dict]) -> dict[str, float]:
    """Figures of routers in training, by modality and averaged over blocks."""
    rows: dict[str, list[float]] = {}
    for layer in layers:
        modality = layer["layer"].partition("/")[0]
        for figure, value in {
            "dropped": layer["dropped_tokens"],
            "dispatched_entropy": entropy(np.array(layer["expert_shares"])),
        }.items():
            rows.setdefault(f"{modality}_{figure}", []).append(value)
    return {name: statistics.fmean(values) for name, values in rows.items()}


def entropy(shares: np.ndarray) -> float:
    """The entropy of shares that sum to one, in nats."""
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum() + 0.0)


class Comparison(Part):
    """Configurations that are trained alike, each from several seeds."""

    def __init__(
        self, study: Study, name: str, title: str, rows: dict[str, Sequence[Run]]
    ):
        super().__init__(study)
        self.name, self.title = name, title
        self.rows = {
            row: [run._replace(label=row) for run in runs] for row, runs in rows.items()
        }

    def results(self) -> dict:
        # Seed by seed: an interrupted study has all rows of its first seeds.
        turns = [run for seed in zip(*self.rows.values()) for run in seed]
        rows = self.study.finish_all(turns)
        return {
            "title": self.title,
            "rows": {name: summary(runs) for name, runs in rows.items()},
        }

    def show(self, results: dict, console: Console) -> None:
        console.print(comparison_table(results))

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = {k: row["figures"] for k, row in every[self.name]["rows"].items()}
        plots.plot_pair_comparison(rows, path, self.title)
        return [path]


def run_comparisons(study: Study, parts: dict[str, Part]) -> Result:
    """Does parts of a study of pairs, and says what their columns are."""
    result = run_parts(study, parts)
    for note in NOTES:
        study.console.print(note, style="dim", highlight=False)
    return result


def chosen_rows(
    tables: dict[str, dict[str, Any]], parts: Sequence[str], only: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """The rows that train, by part."""
    tables = {part: rows for part, rows in tables.items() if part in parts}
    if only is None:
        return tables
    chosen = {
        part: {name: row for name, row in rows.items() if name in only}
        for part, rows in tables.items()
    }
    unknown = {*only}.difference(*tables.values())
    if unknown or not all(chosen.values()):
        names = {part: list(rows) for part, rows in tables.items()}
        raise ValueError(
            f"Expected --only with rows of each part, of {names}; received: "
            f"{list(only)}"
        )
    return chosen


def summary(runs: Sequence[dict]) -> dict[str, Any]:
    """Means and spreads over the runs of a configuration."""
    return {
        "seeds": len(runs),
        "figures": spreads([run["figures"] for run in runs]),
        "start": spreads([run["start"] for run in runs]),
        "history": {
            name: [
                spread(list(epoch))
                for epoch in zip(*(x["history"][name] for x in runs))
            ]
            for name in runs[0]["history"]
            # Others are figures of callbacks.
            if "/" not in name
        },
        "epoch_seconds": spread([run["epoch_seconds"] for run in runs])
        if all(run["epoch_seconds"] for run in runs)
        else None,
        "parameters": runs[0]["parameters"],
        # The picture of one of them.
        "expert_shares": runs[0]["expert_shares"],
        "collapsed": [message for run in runs for message in run["collapsed"]],
    }


def spreads(figures: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of each figure that all runs have."""
    names = [x for x in figures[0] if all(row.get(x) is not None for row in figures)]
    return {name: spread([row[name] for row in figures]) for name in names}


def comparison_table(results: dict) -> Table:
    """The table of a part."""
    rows = results["rows"]
    seeds = next(iter(rows.values()))["seeds"]
    columns = [
        x for x in COLUMNS if any(x[1] in row["figures"] for row in rows.values())
    ]
    has_starts = any(row["start"] for row in rows.values())
    has_routers = any("collapsed" in row["figures"] for row in rows.values())
    table = new_table(
        f"{results['title']}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
        "model",
        *(title for title, *_ in columns),
        *(["R@1 at start"] if has_starts else []),
        *(["collapsed"] if has_routers else []),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name, row in rows.items():
        cells = [cell(row["figures"], figure, share) for _, figure, share in columns]
        if has_starts:
            cells.append(cell(row["start"], "r1", True))
        if has_routers:
            count = row["figures"].get("collapsed")
            cells.append(
                "-" if count is None else f"{count['mean'] * row['seeds']:.0f}"
            )
        table.add_row(name, *cells)
    return table


def cell(figures: dict, name: str, is_share: bool) -> str:
    """A figure of the table as text."""
    if name not in figures:
        return "-"
    return percent(figures[name]) if is_share else plus_minus(figures[name], 1)
