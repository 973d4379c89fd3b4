"""Compares the routers of *Routers in Vision Mixture of Experts* on a small ViT.

    python tools/router_study.py
    python tools/router_study.py --routers soft sinkhorn_expert_choice --seeds 5
    python tools/router_study.py --dataset tfds:cifar10 --set image_shape=[32,32,3]

The 12 configurations of the paper's Table 1, six routers with k or c of 1 and 2, train
for equally many steps on the same images, each from several seeds; and those with a
transport plan once more with the plan as combine weights, as in section 3.4. The
bundled digits need no download.

Every finished run is a file below the output folder. An interrupted study goes on where
it stopped, and other settings make other files.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from overrides import parse_override
from results import digest, plain, progress_of_runs, read_result
from rich.console import Console
from rich.progress import Progress
from router_study_configuration import SHOTS, TIMING_STEPS, Configuration, Diverged
from router_study_summary import NOTES, summarise, summary_table

import keras_moe
from keras_moe import data, evaluation, models
from keras_moe.analysis import plots
from keras_moe.files import write_json

# In the order of the paper's tables.
ROUTERS = (
    "softmax_token_choice",
    "sinkhorn_token_choice",
    "softmax_expert_choice",
    "sinkhorn_expert_choice",
    "sparsity_constrained_expert_choice",
    "soft",
)
# Those that dispatch by a transport plan.
TRANSPORT = tuple(name for name in ROUTERS if name.startswith(("sinkhorn", "sparsity")))
SELECTED = (1, 2)
COMBINES = ("softmax", "affinity")
# The paper's: C = round(k T / E) of section 3.1, and the order of Algorithm 1.
PAPER = {
    "capacity_factor": 1.0,
    "capacity_rounding": "round",
    "capacity_multiple_of": None,
    "priority": "first_come",
}
# What the study itself sets.
RESERVED = ("router", "num_selected_experts", "seed", "num_classes", "dtype")
TIMING_ROUNDS = 9


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    try:
        study = Study(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        results = study.run(console)
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: the same command goes on from here.", file=sys.stderr)
        return 130
    pictures = draw(results["summary"], args.output)
    write_json(args.output / "results.json", results)
    console.print(summary_table(results))
    for note in results["notes"]:
        console.print(note, style="dim", highlight=False)
    for picture in pictures:
        console.print(f"picture   {picture}")
    console.print(f"results   {args.output / 'results.json'}")
    return 0


def draw(rows: list[dict], folder: Path) -> list[Path]:
    """Accuracy over cost, and the curves; accuracies are with groups and capacity.

    That is how the paper evaluates.
    """
    paths = [folder / "accuracy_over_cost.png"]
    plots.plot_router_study(rows, paths[0], accuracy="grouped_test_accuracy")
    for name, title, chosen in (
        (
            "curves",
            "Routers along training",
            [row for row in rows if row["combine"] == "softmax"],
        ),
        (
            "curves_of_combine",
            "Transport routers along training: the plan or the softmax combines",
            [row for row in rows if row["router"] in TRANSPORT],
        ),
    ):
        if chosen:
            paths.append(folder / f"{name}.png")
            plots.plot_router_curves(chosen, paths[-1], title)
    return paths


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", default="digits", help="digits or tfds:NAME, as keras_moe.data"
    )
    parser.add_argument("--data-dir", help="of TensorFlow Datasets")
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--test-split", default="test")
    parser.add_argument("--preset", default="vmoe_digits")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="override the model's arguments; values are JSON, or else strings",
    )
    parser.add_argument(
        "--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), metavar="ROUTER"
    )
    parser.add_argument(
        "--selected",
        nargs="+",
        type=int,
        choices=SELECTED,
        default=list(SELECTED),
        help="k of token choice, c of the others",
    )
    parser.add_argument(
        "--combine",
        nargs="+",
        choices=COMBINES,
        default=list(COMBINES),
        help="combine weights: the softmax or, for transport routers, the plan too",
    )
    parser.add_argument("--seeds", type=positive(int), default=3, help="how many")
    parser.add_argument("--epochs", type=positive(int), default=20)
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--learning-rate", type=positive(float), default=2e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/router_study"))
    parser.add_argument(
        "--restart", action="store_true", help="forget the finished runs"
    )
    return parser.parse_args(argv)


def positive(kind: Callable) -> Callable:
    """An argument's type: numbers above 0."""

    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected more than 0; received: {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def study_override(text: str) -> tuple[str, object]:
    """`parse_override`, for arguments that the study does not set itself."""
    name, value = parse_override(text)
    if name in RESERVED:
        raise ValueError(
            f"Expected an argument that the study does not set; received: {text}"
        )
    return name, value


class Study:
    """All runs of one command: the data, the configurations and the finished runs."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        # What the user sets goes before the paper's.
        self.overrides = {**PAPER, **dict(map(study_override, args.set))}
        self.num_classes = data.num_classes(args.dataset, args.data_dir)
        backbone = models.from_preset(
            args.preset, task="backbone", load_weights=False, **self.overrides
        )
        self.image_shape = backbone.image_shape
        self.folder = args.output / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)

        # Batches of one size need one compilation.
        self.train_images = self.load(args.train_split)
        self.test_images = self.load(args.test_split)
        labels = np.concatenate([y.numpy() for _, y in self.train_images])
        test_size = sum(len(y) for _, y in self.test_images)
        if min(len(labels), test_size) < args.batch_size:
            raise ValueError(
                "Expected at least one whole batch to train on and to test; received: "
                f"{len(labels)} and {test_size} images, batch_size={args.batch_size}"
            )
        self.steps_per_epoch = len(labels) // args.batch_size
        # Better here than after the first run: a class without enough examples.
        evaluation.sample_shots(labels, SHOTS, self.num_classes)
        rows = [
            (router, selected, combine)
            for combine in COMBINES
            if combine in args.combine
            for selected in sorted(set(args.selected))
            for router in (ROUTERS if combine == "softmax" else TRANSPORT)
            if router in args.routers
        ]
        if not rows:
            raise ValueError(
                f"Expected a router of {', '.join(TRANSPORT)} for --combine affinity; "
                f"received: routers={args.routers}"
            )
        self.configurations = [Configuration(self, *row) for row in rows]
        if args.restart:
            for path in self.folder.glob("*.json"):
                path.unlink()

    def load(self, split: str, **options) -> Any:
        """Batches of a split, as they are unless `options` say otherwise."""
        args = self.args
        return data.load(
            args.dataset,
            split,
            self.image_shape,
            batch_size=args.batch_size,
            data_dir=args.data_dir,
            **{"shuffle": False, **options},
        )

    def load_augmented(self, seed: int) -> Any:
        """Whole batches to train on: shifted and turned, in another order each epoch.

        They are the same for all configurations.
        """
        return self.load(
            self.args.train_split,
            shuffle=True,
            seed=seed,
            augment=[
                keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest"),
                keras.layers.RandomRotation(0.03, fill_mode="nearest"),
            ],
            drop_remainder=True,
        )

    def run(self, console: Console) -> dict:
        """Trains what is not there yet, times the steps, and returns all results."""
        runs = []
        total = len(self.configurations) * self.args.seeds
        with progress_of_runs(console) as progress:
            task = progress.add_task("runs", total=total)
            for configuration in self.configurations:
                for seed in range(self.args.seeds):
                    settings = {**configuration.settings, "seed": seed}
                    path = self.path(f"{configuration.name}-seed{seed}", settings)
                    result = read_result(path, settings)
                    if result is None:
                        result = configuration.train(seed, progress)
                        write_json(path, {"settings": settings, "result": result})
                        progress.console.print(
                            f"{configuration.name} seed {seed}: "
                            f"{result['test_accuracy']:.2%} of the test images, "
                            f"{result['seconds']:.0f} s"
                        )
                    else:
                        progress.console.print(
                            f"{configuration.name} seed {seed}: finished before"
                        )
                    runs.append(
                        {**configuration.labels, "seed": seed, "result": result}
                    )
                    progress.advance(task)
        seconds = self.step_seconds(console)
        return {
            "settings": self.settings(),
            "notes": [note.format(baseline=next(iter(seconds))) for note in NOTES],
            "summary": summarise(runs, seconds, self.steps_per_epoch),
            "runs": runs,
        }

    def settings(self) -> dict:
        """What influences every run, as plain data."""
        args = self.args
        backend = keras.backend.backend()
        variable = self.configurations[0].model.variables[0]
        return plain(
            {
                "dataset": args.dataset,
                "data_dir": args.data_dir,
                "train_split": args.train_split,
                "test_split": args.test_split,
                "preset": args.preset,
                "overrides": self.overrides,
                "epochs": args.epochs,
                "batch_size": args.batch_size,
                "learning_rate": args.learning_rate,
                "backend": backend,
                "device": str(variable.value.device),
                "versions": {
                    "keras_moe": keras_moe.__version__,
                    "keras": keras.__version__,
                    backend: importlib.import_module(backend).__version__,
                },
            }
        )

    def path(self, name: str, settings: dict) -> Path:
        """The file of a result, by its name and all that influences it."""
        return self.folder / f"{name}-{digest(settings)}.json"

    def step_seconds(self, console: Console) -> dict[str, float]:
        """The median seconds of a training step of each configuration, or as stored.

        A machine's speed drifts, so all configurations are timed together, in turn.
        """
        settings = {c.name: c.settings for c in self.configurations}
        path = self.path("step_seconds", settings)
        stored = read_result(path, settings)
        if stored is not None:
            return stored
        # Without the time that loading and augmentation take.
        batches = self.load_augmented(0).repeat().take(TIMING_STEPS).cache()
        seconds = {c.name: [] for c in self.configurations}
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("step times", total=TIMING_ROUNDS + 1)
            # The first round compiles and warms up.
            for turn in range(TIMING_ROUNDS + 1):
                for configuration in self.configurations:
                    took = configuration.time_steps(batches)
                    if turn:
                        seconds[configuration.name].append(took)
                progress.advance(task)
        medians = {name: statistics.median(row) for name, row in seconds.items()}
        write_json(path, {"settings": settings, "result": medians})
        return medians


if __name__ == "__main__":
    sys.exit(main())
