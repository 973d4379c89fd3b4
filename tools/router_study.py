"""Compares the routers of *Routers in Vision Mixture of Experts* on a small ViT.

    python tools/router_study.py
    python tools/router_study.py --routers soft sinkhorn_expert_choice --seeds 5
    python tools/router_study.py --dataset tfds:cifar10 --set image_shape=[32,32,3]

The 12 configurations of the paper's Table 1, six routers with k or c of 1 and 2, train
for equally many steps on the same images, each from several seeds. The bundled digits
need no download.

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from overrides import parse_override
from results import (
    digest,
    plain,
    progress_of_runs,
    read_result,
    spread,
)
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import keras_moe
from keras_moe import analysis, data, evaluation, models
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
SELECTED = (1, 2)
SHOTS = 10
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
TIMING_STEPS = 10
# The keys of a run's result of which the summary has means and spreads.
MEASURES = (
    "test_accuracy",
    "grouped_test_accuracy",
    "few_shot_accuracy",
    "dropped_tokens",
    "load_entropy",
)
NOTES = (
    "accuracy: of the test images in %, each routed by itself, which is the library's "
    "default; ± is one standard deviation over the seeds.",
    "grouped: the same, with the groups and the capacity of training.",
    f"{SHOTS}-shot: of a linear classifier on {SHOTS} features per class.",
    "time: a training step's in `fit`, over that of {baseline}; medians of "
    "interleaved rounds.",
    "dropped: test tokens that no expert served, and entropy: of the experts' load, 1 "
    "is balanced; both with the groups and the capacity of training but no noise, "
    "averaged over the MoE blocks.",
)


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
    picture = args.output / "accuracy_over_cost.png"
    # As the paper evaluates: with the groups and the capacity of training.
    plots.plot_router_study(
        results["summary"], picture, accuracy="grouped_test_accuracy"
    )
    write_json(args.output / "results.json", results)
    console.print(summary_table(results))
    for note in results["notes"]:
        console.print(note, style="dim", highlight=False)
    console.print(f"picture   {picture}")
    console.print(f"results   {args.output / 'results.json'}")
    return 0


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


class Diverged(Exception):
    """Training ended in numbers that are not finite."""


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
        pairs = [
            (router, selected)
            for selected in sorted(set(args.selected))
            for router in ROUTERS
            if router in args.routers
        ]
        self.configurations = [Configuration(self, *pair) for pair in pairs]
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
            "summary": summarise(runs, seconds),
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


class Configuration:
    """One row of the paper's table: a router with k or c, and its model.

    The model is compiled once. Each run starts it from the state of a new one.
    """

    def __init__(self, study: Study, router: str, selected: int):
        self.study = study
        self.labels = {"router": router, "selected": selected}
        self.name = f"{router}-{selected}"
        self.model = self.new_model(0)
        self.has_fit = False
        self.inference = keras.Model(
            self.model.input,
            {"logits": self.model.output, "features": self.model.features},
        )
        self.grouped_model = self.new_model(
            0, **as_in_training(router, study.overrides)
        )
        self.grouped = keras.Model(
            self.grouped_model.input,
            {
                "logits": self.grouped_model.output,
                "routing": self.grouped_model.routing,
            },
        )

    @property
    def settings(self) -> dict:
        """What influences the runs, apart from the seed."""
        config = self.model.backbone.get_config()
        config.pop("name")
        return {**self.study.settings(), **self.labels, "model": plain(config)}

    def new_model(self, seed: int, **overrides) -> keras.Model:
        """A model whose weights and noise follow from the seed."""
        args = self.study.args
        keras.utils.set_random_seed(seed)
        model = models.from_preset(
            args.preset,
            num_classes=self.study.num_classes,
            load_weights=False,
            router=self.labels["router"],
            num_selected_experts=self.labels["selected"],
            seed=seed,
            **{**self.study.overrides, **overrides},
        )
        # The quickstart's optimizer and schedule.
        steps = args.epochs * self.study.steps_per_epoch
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0,
            steps,
            warmup_target=args.learning_rate,
            warmup_steps=steps // 10,
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(
                schedule, weight_decay=0.05, global_clipnorm=1.0
            )
        )
        model.optimizer.build(model.trainable_variables)
        return model

    def warm_up(self) -> None:
        """Compiles the training step.

        A model's first `fit` looks at the data once more than others, and so would
        see the images of another pass than a second seed's.
        """
        if not self.has_fit:
            batches = self.study.load_augmented(0).take(1)
            self.model.fit(batches, shuffle=False, verbose=0)
            self.has_fit = True

    def start(self, seed: int) -> None:
        """Gives the model the weights, noise and optimizer of a new one."""
        self.warm_up()
        fresh = self.new_model(seed)
        for variable, value in zip(all_variables(self.model), all_variables(fresh)):
            variable.assign(value)

    def train(self, seed: int, progress: Progress) -> dict:
        """Trains from a seed, and evaluates."""
        begin = time.perf_counter()
        self.start(seed)
        batches = self.study.load_augmented(seed)
        epochs = self.study.args.epochs
        task = progress.add_task(f"{self.name} seed {seed}", total=epochs)

        def show(epoch, logs):
            loss = logs["loss"]
            progress.update(
                task,
                completed=epoch + 1,
                description=f"{self.name} seed {seed}, loss {loss:.3f}",
            )
            if not math.isfinite(loss):
                raise Diverged(
                    f"{self.name} with seed {seed} diverged in epoch {epoch + 1} "
                    f"(loss={loss}); try a smaller --learning-rate"
                )

        history = self.model.fit(
            batches,
            epochs=epochs,
            shuffle=False,  # The batches come shuffled.
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=show)],
        )
        result = self.evaluate()
        progress.remove_task(task)
        return {
            **result,
            "train_loss": [float(loss) for loss in history.history["loss"]],
            "seconds": time.perf_counter() - begin,
        }

    def evaluate(self) -> dict:
        """Accuracies, and what the routers did with the test images."""
        study, size = self.study, self.study.args.batch_size
        train, train_labels = predict(self.inference, study.train_images, size)
        test, test_labels = predict(self.inference, study.test_images, size)
        few_shot = evaluation.few_shot(
            train["features"],
            train_labels,
            test["features"],
            test_labels,
            shots=(SHOTS,),
            num_classes=study.num_classes,
        )
        self.grouped_model.set_weights(self.model.get_weights())
        # Only whole batches have the groups of training.
        whole = study.load(study.args.test_split, drop_remainder=True)
        grouped, grouped_labels = predict(self.grouped, whole, size)
        is_token_choice = self.labels["router"].endswith("token_choice")
        routing = {
            name: analysis.routing_statistics(
                record, self.labels["selected"] if is_token_choice else None
            )
            for name, record in grouped["routing"].items()
        }
        blocks = routing.values()
        return {
            "test_accuracy": accuracy(test["logits"], test_labels),
            "grouped_test_accuracy": accuracy(grouped["logits"], grouped_labels),
            "few_shot_accuracy": float(few_shot.mean[0]),
            "dropped_tokens": statistics.fmean(b.dropped_tokens for b in blocks),
            "load_entropy": statistics.fmean(b.load_entropy for b in blocks),
            "routing": {name: block.to_dict() for name, block in routing.items()},
        }

    def time_steps(self, batches: Any) -> float:
        """The mean seconds of a training step in one epoch of batches."""
        self.warm_up()
        clock = Stopwatch()
        self.model.fit(batches, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds / TIMING_STEPS


class Stopwatch(keras.callbacks.Callback):
    """The seconds of an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])  # Waits for the last step.
        self.seconds = time.perf_counter() - self.start


def as_in_training(router: str, overrides: dict) -> dict:
    """Arguments that make a model's inference group tokens and limit experts so."""
    if router == "soft":
        return {}
    if router.endswith("token_choice"):
        return {"eval_capacity_factor": overrides["capacity_factor"]}
    options = overrides.get("router_options") or {}
    return {"router_options": {**options, "batch_invariant": False}}


def all_variables(model: keras.Model) -> list:
    """Weights, noise and the optimizer's state."""
    return [*model.variables, *model.optimizer.variables]


def predict(model: keras.Model, batches: Any, size: int) -> tuple[Any, np.ndarray]:
    """The outputs for all images, and the labels.

    A last batch is filled up to `size`, so that nothing is compiled for it.
    """
    outputs, labels = [], []
    for images, batch_labels in batches:
        images, count = images.numpy(), len(images)
        images = np.concatenate([images, np.repeat(images[-1:], size - count, axis=0)])
        output = model.predict_on_batch(images)
        outputs.append(keras.tree.map_structure(lambda x, n=count: x[:n], output))
        labels.append(batch_labels.numpy())
    whole = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)
    return whole, np.concatenate(labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float((logits.argmax(axis=-1) == labels).mean())


def summarise(runs: list[dict], seconds: dict[str, float]) -> list[dict]:
    """One row for each configuration: its runs' means and spreads, and its cost."""
    # Softmax token choice with k = 1, if it is there.
    baseline = next(iter(seconds))
    rows = []
    for name in seconds:
        group = [r for r in runs if f"{r['router']}-{r['selected']}" == name]
        row = {key: group[0][key] for key in ("router", "selected")}
        row["seeds"] = [run["seed"] for run in group]
        for key in MEASURES:
            row[key] = spread([run["result"][key] for run in group])
        row["step_seconds"] = seconds[name]
        row["relative_step_time"] = seconds[name] / seconds[baseline]
        row["step_time_over"] = baseline
        rows.append(row)
    return rows


def summary_table(results: dict) -> Table:
    settings, rows = results["settings"], results["summary"]
    table = Table(
        title=f"{settings['preset']} on {settings['dataset']}, {settings['epochs']} "
        f"epochs, {len(rows[0]['seeds'])} seeds, {settings['backend']}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("router", min_width=20)
    columns = ("k/c", "accuracy", "grouped", f"{SHOTS}-shot", "time")
    for column in (*columns, "dropped", "entropy"):
        table.add_column(column, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]]):
        table.add_row(
            row["router"].replace("_", " "),
            str(row["selected"]),
            *(
                f"{100 * row[key]['mean']:.1f}±{100 * row[key]['std']:.1f}"
                for key in MEASURES[:3]
            ),
            f"{row['relative_step_time']:.2f}",
            f"{row['dropped_tokens']['mean']:.1%}",
            f"{row['load_entropy']['mean']:.3f}",
            end_section=row["selected"] != following["selected"],
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
