"""Ask what experts gain on real images, and which of their newer parts pay.

models compares dense models, a wide one and mixtures of experts; kinds other numbers
and places of experts, other routers and experts; large models of twice the width; few a
tenth of the images; left_out trains on half of the classes, for 10-shot probes of the
others. bias compares sigmoid gates whose selection bias balances the experts with
auxiliary losses, here and for the preset vmoe_digits by its own recipe; upcycled the
ways to begin with a trained dense model, at equal steps; muon that optimizer with
AdamW, each with the best of the same rates; official whether training equals that of
google-research/vmoe.

Models of a seed see the same batches, and differences are taken seed by seed. Images
held out of the training split choose between settings; the test images are read once,
by the weights that were chosen. --epochs is a whole run, of which upcycled is half.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich import box
from rich.console import Console

from keras_moe import analysis, data, evaluation, models, training
from keras_moe.analysis.plots import plot_errors_over_costs
from keras_moe.cli._arguments import RESUMES, Result, add_count, add_data
from keras_moe.cli.train import backend_and_versions
from keras_moe.training._upcycled import copy_weights
from tools.benchmark import timing
from tools.studies import plots
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    Watch,
    accuracy,
    add_numbers,
    add_parts,
    add_training,
    arrays_as_weights,
    new_table,
    percent,
    plus_minus,
    run_parts,
    spread,
    spread_of,
    weights_as_arrays,
)

EXAMPLES = """\
python -m tools.studies experts
python -m tools.studies experts --parts bias muon --seeds 5
python -m tools.studies experts --train-images 20000 --epochs 10"""
INTERRUPTED = RESUMES
PARTS = ("models", "kinds", "large", "few", "left_out", "bias", "upcycled", "muon")
MODEL = {
    "preset": "vmoe_digits",
    "load_weights": False,
    "image_shape": [28, 28, 1],
    "patch_size": 7,
    "hidden_dim": 32,
    "num_layers": 4,
    "num_heads": 4,
    "mlp_dim": 64,
}
DENSE = {"model.moe_layers": None}
# As many parameters as a V-MoE in every other block.
WIDE = {**DENSE, "model.mlp_dim": 288}
# The recipe of the preset, in as many steps without the images that are held out.
DIGITS, DIGITS_EPOCHS, DIGITS_HELD_OUT = "vmoe_digits", 31, 256
FIGURES = (
    *("accuracy", "nll", "largest_load", "training_load"),
    *("ten_shot_digits", "ten_shot_left_out"),
)
FREE = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}
TWICE = {"model.hidden_dim": 64, "model.mlp_dim": 128}
STEP_ROUNDS = 20
# Examples of a class in linear probes.
SHOTS = 10
# Batches of training images whose load is measured.
LOAD_BATCHES = 40

Overrides = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, (*PARTS, "official"))
    add_data(parser, default="fashion_mnist")
    for name, default, text in (
        ("train-images", None, "The number of images to train on; by default all."),
        ("held-out", 5000, "The number of training images to choose by instead."),
    ):
        add_count(parser, f"--{name}", text, default)
    add_count(
        parser, "--selected", "The numbers of experts of a token.", [1, 2], nargs="+"
    )
    what = "The learning rates of which muon chooses one for each model."
    add_numbers(parser, "--rates", "RATE", what, [1e-3, 2e-3, 4e-3, 8e-3])
    add_training(parser, "experts_study", 40, 128, 2e-3)


def run(args: argparse.Namespace, console: Console) -> Result:
    study = Study(args.output, backend_and_versions(), console, args.restart)
    recipe = training.Recipe(
        "experts",
        data={
            "source": args.data,
            "batch_size": args.batch_size,
            "augment": ["flip", "translation"],
        },
        model=MODEL,
        optimizer={"weight_decay": 0.05},
        schedule={
            "epochs": args.epochs,
            "learning_rate": args.learning_rate,
            "warmup_steps": 0.1,
        },
    )
    half = {"schedule.epochs": max(args.epochs // 2, 1)}
    own = recipe, args.held_out, args.train_images, args.data_dir
    task = Task(study, *own)
    make = {
        "models": lambda: {args.data: (task, sizes())},
        "kinds": lambda: {args.data: (task, kinds())},
        "large": lambda: {f"{args.data}, width 64": (task, sizes(TWICE))},
        "few": lambda: {
            f"{args.data}, a tenth": (task.of_tenth(), sizes()),
        },
        "left_out": lambda: {
            f"{args.data}, half of the classes": (
                Task(study, *own, left_out=range(task.classes // 2, task.classes)),
                sizes(),
            )
        },
        "bias": lambda: {
            **{f"{args.data}, K={k}": (task, balances(k)) for k in args.selected},
            DIGITS: (digits_task(study), balances(2, softmax=False)),
        },
        "upcycled": lambda: {args.data: (task, beginnings(half))},
        "muon": lambda: {
            f"{args.data}, {name}": (task, optimizers(own, args.rates))
            for name, own in (("dense", DENSE), ("V-MoE, K=2", moe(2)))
        },
    }
    parts: dict[str, Part] = {
        name: Comparison(study, name, make[name](), args.seeds)
        for name in PARTS
        if name in args.parts
    }
    if "official" in args.parts:
        if keras.backend.backend() == "jax":
            # The official code is JAX.
            from tools.studies.official_training import Official, models_of

            parts["official"] = Official(study, task, models_of(task), args.seeds)
        else:
            console.print("official  left out: it needs KERAS_BACKEND=jax")
    return run_parts(study, parts)


class Model(NamedTuple):
    """A model of a recipe, and what it begins with.

    Attributes:
        overrides: of the recipe.
        dense: the overrides of a dense model with whose trained weights it begins.
        noise, reinitialize: see `keras_moe.training.upcycle`.
    """

    overrides: Overrides
    dense: Overrides | None = None
    noise: float = 0.0
    reinitialize: float = 0.0


# The settings of each row, of which validation chooses one, by name. The first row is
# the control.
Rows = Mapping[str, Mapping[str, Model]]


def moe(selected: int, moe_layers: str = "every_2", **arguments: Any) -> Overrides:
    """Overrides of a V-MoE of 8 experts."""
    own = {"num_selected_experts": selected, "moe_layers": moe_layers, **arguments}
    return {f"model.{name}": value for name, value in own.items()}


def only(rows: Mapping[str, Overrides]) -> Rows:
    """Rows of one setting each."""
    return {name: {"": Model(own)} for name, own in rows.items()}


def sizes(own: Overrides | None = None) -> Rows:
    """A dense model, a wide one and mixtures of experts, all with these overrides."""
    own = own or {}
    width = WIDE["model.mlp_dim"] * own.get("model.mlp_dim", 64) // 64
    rows = {
        "dense": DENSE,
        "wide": {**DENSE, **own, "model.mlp_dim": width},
        "V-MoE, K=1, every other block": moe(1),
        "V-MoE, K=2, all blocks": moe(2, "every_1"),
    }
    return only({name: {**own, **row} for name, row in rows.items()})


def kinds() -> Rows:
    """Numbers and places of experts, routers and experts of other kinds."""
    return only(
        {
            "dense": DENSE,
            "V-MoE, K=1, every other block": moe(1),
            "V-MoE, K=2, every other block": moe(2),
            "V-MoE, K=1, all blocks": moe(1, "every_1"),
            "V-MoE, K=1 and a shared expert": moe(1, shared_experts=1),
            "Sinkhorn, K=1": moe(1, router="sinkhorn_token_choice"),
            "expert choice": moe(1, router="softmax_expert_choice"),
            "Soft MoE": moe(1, router="soft"),
            "MoE++, K=2": moe(2, **FREE, gating_residual=True),
            "muMoE": {"model.moe_layers": "every_2", "model.router": "mumoe"},
        }
    )


def balances(selected: int, softmax: bool = True) -> Rows:
    """What keeps the experts' loads equal, on both kinds of gates or on sigmoids."""
    # With K=1 a normalised gate has no gradient.
    gates = {"gates": "sigmoid", "normalize_gates": "before" if selected > 1 else None}
    bias = {"selection_bias_rate": 1e-3}
    return only(
        {
            "softmax, auxiliary losses": moe(selected),
            **({"softmax, selection bias": moe(selected, **bias)} if softmax else {}),
            "sigmoid, selection bias": moe(selected, **gates, **bias),
            "sigmoid, nothing": moe(selected, **gates, auxiliary_losses=None),
        }
    )


def beginnings(half: Overrides) -> Rows:
    """Dense models that go on as they are or as experts, and experts from scratch."""
    dense, sparse = {**DENSE, **half}, {**moe(2, normalize_gates="after"), **half}
    return {
        name: {"": model}
        for name, model in {
            "dense, trained on": Model(dense, dense),
            "upcycled, copies": Model(sparse, dense),
            "upcycled, copies and noise": Model(sparse, dense, noise=0.1),
            "drop-upcycled": Model(sparse, dense, reinitialize=0.5),
            "V-MoE from scratch": Model(moe(2)),
        }.items()
    }


def optimizers(own: Overrides, rates: list[float]) -> Rows:
    """Two optimizers with as many learning rates."""
    return {
        label: {
            f"{rate:g}": Model(
                {**own, "optimizer.name": name, "schedule.learning_rate": rate}
            )
            for rate in rates
        }
        for label, name in (("AdamW", "adamw"), ("Muon", "muon"))
    }


class Task:
    """A recipe on part of its training images, of which others are held out.

    Images of classes that are left out are in no split.
    """

    def __init__(
        self,
        study: Study,
        recipe: training.Recipe,
        held_out: int,
        train_images: int | None = None,
        data_dir: str | None = None,
        left_out: Sequence[int] = (),
    ):
        self.study, self.recipe, self.data_dir = study, recipe, data_dir
        self.models, self.predictors, self.left_out = {}, {}, list(left_out)
        source, batch_size = recipe.data.source, recipe.data.batch_size
        self.classes = data.num_classes(source, data_dir)
        self.count = data.num_examples(source, "train", data_dir)
        order = np.random.default_rng(0).permutation(self.count)
        if self.left_out:
            order = order[~np.isin(self.whole("train")[1], self.left_out)[order]]
        parts = order[:held_out], order[held_out:][:train_images]
        self.parts = dict(zip(("validation", "train"), parts))
        if len(parts[1]) < batch_size:
            raise ValueError(
                "Expected a whole batch to train on beside --held-out; received: "
                f"{len(parts[1])} of {self.count} images, batch_size={batch_size}"
            )

    def of_tenth(self) -> "Task":
        """The same with a tenth of the images."""
        count = len(self.parts["train"]) // 10
        held_out = len(self.parts["validation"])
        return Task(self.study, self.recipe, held_out, count, self.data_dir)

    def options(self, **options: Any) -> dict[str, Any]:
        """What every `load` of images has in common."""
        return {
            "image_shape": tuple(self.recipe.model.overrides["image_shape"]),
            "batch_size": self.recipe.data.batch_size,
            "data_dir": self.data_dir,
            **options,
        }

    def whole(self, split: str) -> list[np.ndarray]:
        """All images and labels of a split, held out or not."""
        source, options = self.recipe.data.source, self.options(shuffle=False)
        batches = data.load(source, split, **options)
        return [np.concatenate(x) for x in zip(*batches.as_numpy_iterator())]

    def load(self, split: str, **options: Any) -> Any:
        """Batches of `"train"`, `"validation"` or `"test"`."""
        exclude = ()
        if split in self.parts:
            exclude = np.setdiff1d(np.arange(self.count), self.parts[split])
        return data.load(
            self.recipe.data.source,
            "test" if split == "test" else "train",
            exclude=exclude,
            **self.options(**{"shuffle": False, **options}),
        )

    def load_augmented(self, seed: int, **options: Any) -> Any:
        """Batches to train on."""
        augment = self.recipe.data.augment
        return self.load("train", augment=augment, shuffle=True, seed=seed, **options)

    def recipe_of(self, overrides: Overrides, seed: int) -> training.Recipe:
        return self.recipe.replace(**{**overrides, "seed": seed})

    def new_run(self, model: Model, seed: int, label: str) -> Run:
        """The training of a model, which keeps its weights.

        Its name is not the label: rows that two parts share are one run.
        """
        settings = {
            **self.recipe_of(model.overrides, seed).settings(),
            "data_dir": self.data_dir,
            **{name: len(part) for name, part in self.parts.items()},
            **({"left_out": self.left_out} if self.left_out else {}),
        }
        if model.dense is not None:
            settings["start"] = {
                "dense": self.study.settings_of(self.dense_run(model, seed)),
                "noise": model.noise,
                "reinitialize": model.reinitialize,
            }
        make = functools.partial(self.train, model, seed)
        return Run("trained", seed, settings, make, label)

    def dense_run(self, model: Model, seed: int) -> Run:
        return self.new_run(Model(model.dense or {}), seed, "dense")

    def train(
        self, model: Model, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict[str, np.ndarray]]:
        recipe = self.recipe_of(model.overrides, seed)
        dense = None
        if model.dense is not None:
            before = self.dense_run(model, seed)
            self.study.finish(before, on_progress)
            dense = self.with_weights(model.dense, self.study.arrays(before))
        keras.utils.set_random_seed(seed)
        trained = recipe.new_model(self.classes)
        if dense is not None:
            copy_weights(dense, trained, model.noise, model.reinitialize, seed)
        steps = len(self.parts["train"]) // recipe.data.batch_size
        recipe.compile(trained, steps)
        history = trained.fit(
            self.load_augmented(seed, repeat=True, one_hot=True),
            epochs=recipe.passes(steps),
            steps_per_epoch=steps,
            shuffle=False,  # The batches come shuffled.
            callbacks=[*recipe.callbacks(), Watch(on_progress)],
            verbose=0,
        ).history
        arrays = weights_as_arrays(trained)
        result = {
            "validation": self.figures(
                model.overrides, arrays, self.load("validation")
            ),
            "history": history,
            "loss": history["loss"][-1],
        }
        return result, arrays

    def with_weights(
        self, overrides: Overrides, arrays: dict[str, np.ndarray]
    ) -> keras.Model:
        """The model of a finished run; one for all seeds, which compiles once."""
        recipe = self.recipe_of(overrides, 0)
        key = str(recipe.model)
        if key not in self.models:
            self.models[key] = recipe.new_model(self.classes)
        self.models[key].set_weights(arrays_as_weights(arrays))
        return self.models[key]

    def costs(self, overrides: Overrides) -> dict[str, float]:
        """Parameters, and MFLOPs of an image."""
        own = self.recipe_of(overrides, 0).model
        described = models.describe(
            own.preset, load_weights=False, num_classes=self.classes, **own.overrides
        )
        return {"parameters": described.parameters, "mflops": 1e3 * described.gflops}

    def test_run(self, model: Model, seed: int, label: str) -> Run:
        """The look at the test images of a model that was chosen."""
        trained = self.new_run(model, seed, label)

        def make(on_progress):
            own = model.overrides, self.study.arrays(trained)
            figures = self.figures(*own, self.load("test"))
            if "largest_load" in figures:
                seen = self.load_augmented(seed).take(LOAD_BATCHES)
                figures["training_load"] = self.figures(*own, seen)["largest_load"]
            return {**figures, **self.probes(*own)}, {}

        settings = {"trained": self.study.settings_of(trained), "probes": SHOTS}
        return Run("tested", seed, settings, make, label)

    def times_run(self, rows: Mapping[str, Overrides]) -> Run:
        """The time of a training step of each row, in ms, interleaved."""

        def make(on_progress):
            batches = self.load_augmented(0, one_hot=True)
            batch = next(iter(batches.as_numpy_iterator()))
            steps = {}
            for label, overrides in rows.items():
                on_progress(label)
                recipe = self.recipe_of(overrides, 0)
                model = recipe.new_model(self.classes)
                recipe.compile(model, 100)
                steps[label] = functools.partial(model.train_on_batch, *batch)
            times = timing.interleaved(steps, STEP_ROUNDS)
            return {label: 1e3 * x for label, x in times.items()}, {}

        settings = {"rows": rows, "recipe": self.recipe.settings()}
        return Run("step_times", 0, settings, make)

    def figures(
        self, overrides: Overrides, arrays: dict[str, np.ndarray], batches: Any
    ) -> dict[str, float]:
        """Accuracy, mean log loss and, with experts, their largest load.

        The load is of all tokens of these images, none of which is dropped, over the
        mean of the experts, in the block where that is most.
        """
        images, labels = map(np.concatenate, zip(*batches.as_numpy_iterator()))
        if self.left_out:
            kept = ~np.isin(labels, self.left_out)
            images, labels = images[kept], labels[kept]
        model: Any = self.with_weights(overrides, arrays)
        if id(model) not in self.predictors:
            outputs = {"logits": model.output, "routing": model.routing}
            self.predictors[id(model)] = keras.Model(model.input, outputs)
        outputs = self.predictors[id(model)].predict(
            images, batch_size=self.recipe.data.batch_size, verbose=0
        )
        probabilities = keras.ops.convert_to_numpy(
            keras.ops.softmax(outputs["logits"].astype("float32"))
        )
        figures = {
            "accuracy": accuracy(outputs["logits"], labels),
            "nll": float(evaluation.calibration(probabilities, labels).nll),
        }
        shares = [
            analysis.routing_statistics(record).expert_shares
            for record in outputs["routing"].values()
        ]
        if shares:
            figures["largest_load"] = max(float(x.max() * len(x)) for x in shares)
        return figures

    def probes(
        self, overrides: Overrides, arrays: dict[str, np.ndarray]
    ) -> dict[str, float]:
        """Linear accuracies from few examples of classes that were not trained on.

        Digits (Fashion-MNIST's size), and the classes that are left out.
        """
        model: Any = self.with_weights(overrides, arrays)
        shape = self.options()["image_shape"]
        sources = {}
        if self.recipe.data.source != "digits":
            sources["digits"] = (
                data.load_digits("train", image_shape=shape),
                data.load_digits("test", image_shape=shape),
            )
        if self.left_out:
            sources["left_out"] = [
                (images[chosen], labels[chosen] - min(self.left_out))
                for images, labels in map(self.whole, ("train", "test"))
                for chosen in (np.isin(labels, self.left_out),)
            ]
        features = keras.Model(model.input, model.features)
        return {
            f"ten_shot_{name}": float(
                evaluation.few_shot(
                    *evaluation.extract_features(features, train, 500, verbose=0),
                    *evaluation.extract_features(features, test, 500, verbose=0),
                    shots=(SHOTS,),
                ).mean[0]
            )
            for name, (train, test) in sources.items()
        }


def digits_task(study: Study) -> Task:
    """The setting of the preset `vmoe_digits`."""
    recipe = training.load_recipe(DIGITS, **{"schedule.epochs": DIGITS_EPOCHS})
    shape = models.registry.builtin_presets()[DIGITS]["config"]["image_shape"]
    recipe = recipe.replace(**{"model.image_shape": shape})
    return Task(study, recipe, DIGITS_HELD_OUT)


class Comparison(Part):
    """Models from several seeds, and their differences from a control."""

    def __init__(
        self,
        study: Study,
        name: str,
        tables: Mapping[str, tuple[Task, Rows]],
        seeds: int,
    ):
        super().__init__(study)
        self.name, self.tables, self.seeds = name, tables, seeds

    def results(self) -> dict:
        rows = [
            (title, task, label, settings)
            for title, (task, own) in self.tables.items()
            for label, settings in own.items()
        ]
        self.study.finish_all(
            [
                task.new_run(model, 0, f"{title}, {label} {name}".rstrip())
                for title, task, label, settings in rows
                for name, model in settings.items()
            ]
        )
        # All choices are made before the first look at the test images.
        tried = [
            {
                name: self.study.finish(task.new_run(model, 0, label))["validation"]
                for name, model in settings.items()
            }
            for _, task, label, settings in rows
        ]
        chosen = [min(x, key=lambda name, x=x: x[name]["nll"]) for x in tried]
        seeds = range(self.seeds)
        runs = [
            (
                [task.new_run(settings[name], x, f"{title}, {label}") for x in seeds],
                [task.test_run(settings[name], x, f"{title}, {label}") for x in seeds],
            )
            for (title, task, label, settings), name in zip(rows, chosen)
        ]
        for part in zip(*runs):
            self.study.finish_all([run for row in part for run in row])
        tables = {title: {} for title in self.tables}
        times = {
            title: self.study.finish(
                task.times_run(
                    {
                        label: settings[name].overrides
                        for (other, _, label, settings), name in zip(rows, chosen)
                        if other == title
                    }
                )
            )
            for title, (task, _) in self.tables.items()
        }
        for (title, task, label, settings), name, own, both in zip(
            rows, chosen, tried, runs
        ):
            trained, tested = (list(map(self.study.finish, part)) for part in both)
            table = tables[title]
            accuracies = [result["accuracy"] for result in tested]
            control = next(iter(table.values()))["accuracies"] if table else accuracies
            held_out = [result["validation"] for result in trained]
            table[label] = {
                "chosen": name,
                "tried": {key: figures["nll"] for key, figures in own.items()},
                "accuracies": accuracies,
                "difference": spread([x - y for x, y in zip(accuracies, control)]),
                "held_out": spread_of(held_out, "accuracy"),
                "loss": spread_of(trained, "loss"),
                "step_ms": times[title][label],
                **task.costs(settings[name].overrides),
                **{key: spread_of(tested, key) for key in FIGURES if key in tested[0]},
            }
        return tables

    def show(self, results: dict, console: Console) -> None:
        for title, rows in results.items():
            table = new_table(
                f"{self.name}: {title}",
                *("model", "parameters", "MFLOPs", "step", "loss", "test %"),
                *("difference", "NLL", "load", "on test", "10-shot %"),
                box=box.SIMPLE_HEAD,
                padding=(0, 1, 0, 0),
            )
            control = next(iter(rows.values()))
            for label, row in rows.items():
                probes = [row[x] for x in FIGURES if x.startswith("ten") and x in row]
                loads = (row.get(f"{x}_load") for x in ("training", "largest"))
                table.add_row(
                    f"{label} {row['chosen']}".rstrip(),
                    f"{row['parameters']:,}",
                    f"{row['mflops']:.2f}",
                    f"{row['step_ms'] / control['step_ms']:.2f}",
                    plus_minus(row["loss"], 3),
                    percent(row["accuracy"]),
                    percent(row["difference"]),
                    f"{row['nll']['mean']:.3f}",
                    *(plus_minus(load) if load else "" for load in loads),
                    ", ".join(map(percent, probes)),
                )
            console.print(table)

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / "experts.png"
        tables = {
            f"{name}: {title}": rows
            for name in PARTS
            for title, rows in every.get(name, {}).items()
        }
        plots.plot_experts(tables, path)
        return [path, *self._draw_costs(every)]

    def _draw_costs(self, every):
        """Errors over FLOPs and over time, of each part that compares sizes."""
        for name in ("models", "large", "few"):
            for title, rows in every.get(name, {}).items():
                errors = {
                    label: [1 - x for x in row["accuracies"]]
                    for label, row in rows.items()
                }
                costs = {
                    axis: {label: row[key] for label, row in rows.items()}
                    for axis, key in (
                        ("MFLOPs", "mflops"),
                        ("time of a training step, ms", "step_ms"),
                    )
                }
                path = self.study.folder / f"errors_{name}.png"
                plot_errors_over_costs(errors, costs, path, title)
                yield path
