"""`python -m tools.studies routers`: *Routers in Vision MoE* on a small ViT.

The 12 configurations of the paper's Table 1, six routers with k or c of 1 and 2, train
for equally many steps on the same images, each from several seeds; and those with a
transport plan once more with the plan as combine weights, as in section 3.4.
"""

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from keras_moe import data, evaluation, models
from keras_moe.cli.fitting import shifts_and_turns
from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from keras_moe.files import write_json
from tools.studies import plots
from tools.studies.arguments import COMBINES, ROUTERS
from tools.studies.router_configuration import (
    SHOTS,
    TIMING_STEPS,
    Configuration,
)
from tools.studies.router_summary import NOTES, summarise, summary_table
from tools.studies.study import (
    Run,
    Study,
    plain,
    print_path,
    progress_bar,
    run_settings,
)

# Those that dispatch by a transport plan.
TRANSPORT = tuple(name for name in ROUTERS if name.startswith(("sinkhorn", "sparsity")))
# The paper's: C = round(k T / E) of section 3.1, and the order of Algorithm 1.
PAPER = {
    "capacity_factor": 1.0,
    "capacity_rounding": "round",
    "capacity_multiple_of": None,
    "priority": "first_come",
}
# Arguments of the model that the study itself sets.
RESERVED = ("router", "num_selected_experts", "seed", "num_classes", "dtype")
TIMING_ROUNDS = 9


def run(args: argparse.Namespace, console: Console) -> Result:
    """Trains what is not there yet, and summarises."""
    task = Task(args)
    configurations = [Configuration(task, *row) for row in rows_of(args)]
    study = Study(args.output, task.settings(), console, args.restart)
    runs = [
        Run(each.name, seed, each.settings, functools.partial(each.train, seed))
        for each in configurations
        for seed in range(args.seeds)
    ]
    labels = {each.name: each.labels for each in configurations}
    finished = [
        {**labels[run.name], "seed": run.seed, "result": result}
        for run, result in zip(runs, study.finish_all(runs))
    ]
    seconds = step_seconds(study, task, configurations)
    summary = summarise(finished, seconds, task.steps_per_epoch)
    notes = [note.format(baseline=next(iter(seconds))) for note in NOTES]
    results = {
        "settings": study.settings,
        "notes": notes,
        "summary": summary,
        "runs": finished,
    }
    write_json(study.results_path, results)
    console.print(summary_table(results))
    for note in notes:
        console.print(note, style="dim", highlight=False)
    for picture in draw(summary, args.output):
        console.print(f"picture   {picture}")
    return Result(results, lambda console: print_path(study.results_path, console))


def rows_of(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Router, k or c, and combine weights of each configuration."""
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
    return rows


class Task:
    """The images and the model's arguments that all configurations share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        reserved = sorted(set(dict(args.set)) & set(RESERVED))
        if reserved:
            raise ValueError(
                "Expected arguments that the study does not set; "
                f"received: --set {reserved[0]}=..."
            )
        # The user's override the paper's.
        self.overrides = {**PAPER, **dict(args.set)}
        self.num_classes = data.num_classes(args.data, args.data_dir)
        backbone = models.from_preset(
            args.preset, task="backbone", load_weights=False, **self.overrides
        )
        self.image_shape = backbone.image_shape
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

    def load(self, split: str, **options: Any) -> Any:
        """Batches of a split, as they are unless `options` say otherwise."""
        args = self.args
        return data.load(
            args.data,
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
            augment=shifts_and_turns(),
            drop_remainder=True,
        )

    def settings(self) -> dict:
        """The settings that influence every run."""
        names = ("data", "data_dir", "train_split", "test_split", "preset")
        return {
            **{name: getattr(self.args, name) for name in names},
            **run_settings(self.args),
            "overrides": self.overrides,
            **backend_and_versions(),
        }


def step_seconds(
    study: Study, task: Task, configurations: list[Configuration]
) -> dict[str, float]:
    """The median seconds of a training step of each configuration, or as stored.

    A machine's speed drifts, so all configurations are timed together, in turn.
    """

    def measure(tell):
        # Without the time that loading and augmentation take.
        batches = task.load_augmented(0).repeat().take(TIMING_STEPS).cache()
        seconds = {c.name: [] for c in configurations}
        with progress_bar(study.console) as progress:
            bar = progress.add_task("step times", total=TIMING_ROUNDS + 1)
            # The first round compiles and warms up.
            for turn in range(TIMING_ROUNDS + 1):
                for configuration in configurations:
                    took = configuration.time_steps(batches)
                    if turn:
                        seconds[configuration.name].append(took)
                progress.advance(bar)
        return {name: statistics.median(row) for name, row in seconds.items()}, {}

    device = str(configurations[0].model.variables[0].value.device)
    settings = {
        "device": device,
        "configurations": plain({c.name: c.settings for c in configurations}),
    }
    return study.finish(Run("step_seconds", 0, settings, measure))


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
