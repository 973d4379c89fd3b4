"""Compare the routers of Routers in Vision Mixture of Experts on a small ViT.

The 12 configurations of the paper's Table 1, six routers with k or c of 1 and 2, train
for equally many steps on the same images, each from several seeds; and those with a
transport plan once more with the plan as combine weights, as in section 3.4.
"""

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_moe import analysis, data, evaluation, models
from keras_moe._files import write_json
from keras_moe.cli._arguments import (
    RESUMES,
    Result,
    add_data,
    add_overrides,
    add_preset,
)
from keras_moe.cli.train import backend_and_versions
from keras_moe.evaluation.few_shot import sample_shots
from keras_moe.layers import MoEConfig
from tools.studies import plots
from tools.studies.study import (
    OnProgress,
    Run,
    Study,
    Watch,
    accuracy,
    add_training,
    as_json,
    compile_with_cosine,
    new_table,
    percent,
    progress_bar,
    run_settings,
    spread,
    spread_of,
)

EXAMPLES = """\
python -m tools.studies routers
python -m tools.studies routers --routers soft sinkhorn_expert_choice --seeds 5
python -m tools.studies routers --data tfds:cifar10 --set image_shape=[32,32,3]"""
INTERRUPTED = RESUMES
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
COMBINES = ("softmax", "affinity")
SELECTED = (1, 2)
# The paper's: C = round(k T / E) of section 3.1, and the order of Algorithm 1.
PAPER = {
    "capacity_factor": 1.0,
    "capacity_rounding": "round",
    "capacity_multiple_of": None,
    "priority": "first_come",
}
# Arguments of the model that the study itself sets.
RESERVED = ("router", "num_selected_experts", "seed", "num_classes", "dtype")
SHOTS = 10
TIMING_ROUNDS, TIMING_STEPS = 9, 10
# The figures of a run of which the summary has means and spreads.
MEASURES = (
    "test_accuracy",
    "grouped_test_accuracy",
    "few_shot_accuracy",
    "dropped_tokens",
    "load_entropy",
)
# The curves of a run: a value for each epoch.
CURVES = ("train_loss", "grouped_test_accuracy")
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
    "combine: softmax, or the transport plan itself, through which gradients then flow "
    "(section 3.4).",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset(parser, "--preset", default="vmoe_digits")
    add_data(parser, default="digits")
    parser.add_argument("--train-split", default="train", help="The training split.")
    parser.add_argument("--test-split", default="test", help="The test split.")
    add_overrides(parser)
    parser.add_argument(
        "--routers",
        nargs="+",
        choices=ROUTERS,
        default=ROUTERS,
        metavar="ROUTER",
        help="The routers to train.",
    )
    parser.add_argument(
        "--selected",
        nargs="+",
        type=int,
        choices=SELECTED,
        default=SELECTED,
        help="k of token choice, c of the others.",
    )
    parser.add_argument(
        "--combine",
        nargs="+",
        choices=COMBINES,
        default=COMBINES,
        help="The combine weights: the softmax or, for transport routers, the plan, "
        "too.",
    )
    add_training(parser, "routers_study", 20, 32, 2e-3)


def run(args: argparse.Namespace, console: Console) -> Result:
    task = Task(args)
    configurations = [Configuration(task, *row) for row in rows_of(args)]
    study = Study(args.output, task.settings(), console, args.restart)
    runs = [
        Run(each.name, seed, each.settings, functools.partial(each.train, seed))
        for each in configurations
        for seed in range(args.seeds)
    ]
    results = study.finish_all(runs)
    finished = [
        {**each.labels, "seed": seed, "result": result}
        for each in configurations
        for seed, result in enumerate(results[each.name])
    ]
    seconds = step_seconds(study, task, configurations)
    summary = summarise(finished, seconds, task.steps_per_epoch)
    notes = [note.format(baseline=next(iter(seconds))) for note in NOTES]
    values = {
        "settings": study.settings,
        "notes": notes,
        "summary": summary,
        "runs": finished,
    }
    write_json(study.results_path, values)
    console.print(summary_table(values))
    for note in notes:
        console.print(note, style="dim", highlight=False)
    for picture in draw(summary, args.output):
        console.print(f"picture   {picture}")
    return Result(values, (f"results   {study.results_path}",))


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
        self.overrides = dict(args.set)
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
        sample_shots(labels, SHOTS, self.num_classes)

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
            augment=["translation", "rotation"],
            drop_remainder=True,
        )

    def settings(self) -> dict:
        """The settings that influence every run."""
        names = ("data", "data_dir", "train_split", "test_split", "preset")
        return {
            **{name: getattr(self.args, name) for name in names},
            **run_settings(self.args),
            "overrides": {**PAPER, **self.overrides},
            **backend_and_versions(),
        }


class Configuration:
    """One row of the table: a router with k or c, its combine weights and its model.

    The model is compiled once. Each run starts it from the state of a new one.
    """

    def __init__(self, task: Task, router: str, selected: int, combine: str):
        self.task = task
        self.labels = {"router": router, "selected": selected, "combine": combine}
        self.name = name_of(self.labels)
        self.model = self.new_model(0)
        self.has_fit = False
        self.inference = keras.Model(
            self.model.input,
            {"logits": self.model.output, "features": self.model.features},
        )
        # Groups and capacity are those of training, which the soft router has always.
        official = {} if router == "soft" else {"evaluation": "official"}
        self.grouped_model = self.new_model(0, **official)
        self.grouped = keras.Model(
            self.grouped_model.input,
            {
                "logits": self.grouped_model.output,
                "routing": self.grouped_model.routing,
            },
        )

    @property
    def settings(self) -> dict:
        """The settings that influence its runs, apart from the seed."""
        config = self.model.backbone.get_config()
        config.pop("name")
        return {**self.labels, "model": as_json(config)}

    def new_model(self, seed: int, **overrides) -> keras.Model:
        """A model whose weights and noise follow from the seed."""
        args = self.task.args
        keras.utils.set_random_seed(seed)
        router, combine = self.labels["router"], self.labels["combine"]
        # Not every router has all of the paper's arguments.
        known = MoEConfig(router=router).router_arguments
        own = {name: value for name, value in PAPER.items() if name in known}
        own |= self.task.overrides
        if combine != "softmax":
            own["combine"] = combine
        model = models.from_preset(
            args.preset,
            num_classes=self.task.num_classes,
            load_weights=False,
            router=router,
            num_selected_experts=self.labels["selected"],
            seed=seed,
            **{**own, **overrides},
        )
        steps = args.epochs * self.task.steps_per_epoch
        compile_with_cosine(model, steps, args.learning_rate)
        model.optimizer.build(model.trainable_variables)
        return model

    def warm_up(self) -> None:
        """Compiles the training step.

        A model's first `fit` looks at the data once more than others, and so would
        see the images of another pass than a second seed's.
        """
        if not self.has_fit:
            batches = self.task.load_augmented(0).take(1)
            self.model.fit(batches, shuffle=False, verbose=0)
            self.has_fit = True

    def start(self, seed: int) -> None:
        """Gives the model the weights, noise and optimizer of a new one."""
        self.warm_up()
        own, fresh = (
            [*model.variables, *model.optimizer.variables]
            for model in (self.model, self.new_model(seed))
        )
        for variable, value in zip(own, fresh):
            variable.assign(value)

    def train(self, seed: int, on_progress: OnProgress) -> tuple[dict, dict]:
        """Trains from a seed, and evaluates; there are no arrays to keep."""
        begin = time.perf_counter()
        self.start(seed)
        accuracies = []

        def on_epoch():
            grouped, labels = self.predict_grouped()
            accuracies.append(accuracy(grouped["logits"], labels))

        history = self.model.fit(
            self.task.load_augmented(seed),
            epochs=self.task.args.epochs,
            shuffle=False,  # The batches come shuffled.
            verbose=0,
            callbacks=[Watch(on_progress, on_epoch)],
        )
        result = {
            **self.evaluate(),
            "curves": {
                "train_loss": [float(loss) for loss in history.history["loss"]],
                "grouped_test_accuracy": accuracies,
            },
            "seconds": time.perf_counter() - begin,
        }
        return result, {}

    def evaluate(self) -> dict:
        """Accuracies, and what the routers did with the test images."""
        task = self.task
        (train, train_labels), (test, test_labels) = (
            evaluation.extract_features(self.inference, images, verbose=0)
            for images in (task.train_images, task.test_images)
        )
        few_shot = evaluation.few_shot(
            train["features"],
            train_labels,
            test["features"],
            test_labels,
            shots=(SHOTS,),
            num_classes=task.num_classes,
        )
        grouped, grouped_labels = self.predict_grouped()
        is_token_choice = self.labels["router"].endswith("token_choice")
        selected = self.labels["selected"] if is_token_choice else None
        routing = {
            name: analysis.routing_statistics(record, selected)
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

    def predict_grouped(self) -> tuple[Any, np.ndarray]:
        """The outputs with the groups and the capacity of training, and the labels."""
        task = self.task
        self.grouped_model.set_weights(self.model.get_weights())
        # Only whole batches have the groups of training.
        whole = task.load(task.args.test_split, drop_remainder=True)
        return evaluation.extract_features(self.grouped, whole, verbose=0)

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


def name_of(labels: dict) -> str:
    """A configuration's name, such as `"sinkhorn_token_choice-1-affinity"`."""
    combine = "" if labels["combine"] == "softmax" else f"-{labels['combine']}"
    return f"{labels['router']}-{labels['selected']}{combine}"


def step_seconds(
    study: Study, task: Task, configurations: list[Configuration]
) -> dict[str, float]:
    """The median seconds of a training step of each configuration, or as stored.

    A machine's speed drifts, so all configurations are timed together, in turn.
    """

    def measure(on_progress):
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

    settings = {
        "device": str(configurations[0].model.variables[0].value.device),
        "configurations": {c.name: c.settings for c in configurations},
    }
    return study.finish(Run("step_seconds", 0, settings, measure))


def summarise(
    runs: list[dict], seconds: dict[str, float], steps_per_epoch: int
) -> list[dict]:
    """One row for each configuration: means and spreads of its runs, and its cost."""
    # Softmax token choice with k = 1, if it is there.
    baseline = next(iter(seconds))
    rows = []
    for name in seconds:
        group = [run for run in runs if name_of(run) == name]
        results = [run["result"] for run in group]
        row = {key: group[0][key] for key in ("router", "selected", "combine")}
        row["seeds"] = [run["seed"] for run in group]
        row |= {key: spread_of(results, key) for key in MEASURES}
        row["curves"] = curves_of([result["curves"] for result in results])
        epochs = len(row["curves"]["train_loss"]["mean"])
        row["curves"]["step"] = [steps_per_epoch * (n + 1) for n in range(epochs)]
        row["step_seconds"] = seconds[name]
        row["relative_step_time"] = seconds[name] / seconds[baseline]
        row["step_time_over"] = baseline
        rows.append(row)
    return rows


def curves_of(runs: list[dict[str, list[float]]]) -> dict[str, dict]:
    """Means and spreads over the runs, epoch by epoch."""
    curves = {}
    for key in CURVES:
        epochs = [spread(list(values)) for values in zip(*(run[key] for run in runs))]
        curves[key] = {
            name: [epoch[name] for epoch in epochs] for name in ("mean", "std")
        }
    return curves


def summary_table(results: dict) -> Table:
    settings, rows = results["settings"], results["summary"]
    table = new_table(
        f"{settings['preset']} on {settings['data']}, {settings['epochs']} epochs, "
        f"{len(rows[0]['seeds'])} seeds, {settings['backend']}",
        "router",
        *("combine", "k/c", "accuracy", "grouped", f"{SHOTS}-shot", "time"),
        *("dropped", "entropy"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row, following in zip(rows, [*rows[1:], rows[-1]]):
        table.add_row(
            row["router"].replace("_", " "),
            "plan" if row["combine"] == "affinity" else row["combine"],
            str(row["selected"]),
            *(percent(row[key]) for key in MEASURES[:3]),
            f"{row['relative_step_time']:.2f}",
            f"{row['dropped_tokens']['mean']:.1%}",
            f"{row['load_entropy']['mean']:.3f}",
            end_section=any(
                row[key] != following[key] for key in ("selected", "combine")
            ),
        )
    return table


def draw(rows: list[dict], folder: Path) -> list[Path]:
    """Accuracy over cost, and the curves.

    Accuracies are with groups and capacity, since that is how the paper evaluates.
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
