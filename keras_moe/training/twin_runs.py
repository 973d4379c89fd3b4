"""Twins: a model with experts beside dense models of equal FLOPs and parameters."""

import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from keras_moe import data, evaluation, models
from keras_moe._checks import argument_names, check_integer, check_positive, unfit
from keras_moe._files import read_text, write_json
from keras_moe._processes import rank_and_world_size
from keras_moe._tables import numbers_table
from keras_moe.layers.moe_config import MUMOE, moe_config
from keras_moe.models.loading._overrides import moe_names
from keras_moe.models.loading.blueprint import Description
from keras_moe.models.registry import is_architecture
from keras_moe.training.checkpoints import list_checkpoints
from keras_moe.training.non_finite import NonFiniteLoss
from keras_moe.training.objectives import Classification
from keras_moe.training.optimizers import group_factors
from keras_moe.training.recipes import Recipe
from keras_moe.training.run import settings_of_runs, train
from keras_moe.training.run_checkpoint import different_settings, versions
from keras_moe.training.sections import ImageData, ModelConfig, json_copy

if TYPE_CHECKING:
    from rich.table import Table

_EQUAL = {"dense": "a dense model of equal FLOPs", "wide": "one of equal parameters"}
_FIGURES = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE", "loss": "train loss"}
_HEAD = ("model", "parameters", "MFLOPs", "ms a step", "rate", *_FIGURES.values())
_CAPTION = (
    "Test images, ± the standard error over seeds; MFLOPs of an image's forward pass. "
    "The training loss includes auxiliary losses."
)
# 97.5% quantiles of Student's t for two seeds, three and so on; the last one serves for
# more seeds, too.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
# Accuracies' errors below it are of rounding.
_NO_ERROR = 1e-9
# `mlp_dim` is a multiple of these if that changes the cost by less than a share: odd
# sizes are slow on accelerators.
_MULTIPLES, _ROUNDING = (64, 8, 1), 0.005


class Estimate(NamedTuple):
    """A mean over seeds, and its standard error, which a single seed does not have."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The estimate from one value for each seed."""
        mean, count = statistics.fmean(values), len(values)
        return cls(mean, statistics.stdev(values) / count**0.5 if count > 1 else None)

    def text(self, figure: str = "accuracy", sign: str = "") -> str:
        """Accuracies in percent, and other figures as they are."""
        scale, digits = (100, ".2f") if figure == "accuracy" else (1, ".3f")
        error = "" if self.error is None else f" ± {scale * self.error:{digits}}"
        return f"{scale * self.mean:{sign}{digits}}{error}"


class Twin(NamedTuple):
    """One model of a comparison.

    Attributes:
        model: settings of the model, as in a recipe.
        parameters: number of parameters.
        mflops: forward MFLOPs per image.
        learning_rate: the chosen rate.
        tried: validation NLL by learning rate; None where training diverged.
        runs: test accuracy, NLL and ECE, and the last training loss, of each seed.
        step_ms: median time of a training step, or None.
    """

    model: dict
    parameters: int
    mflops: float
    learning_rate: float
    tried: dict[str, float | None]
    runs: list[dict[str, float]]
    step_ms: float | None = None


class Twins(NamedTuple):
    """The result of `twins`.

    Attributes:
        source: source of the data.
        models: a `Twin` for each of `"experts"`, `"dense"` and `"wide"`.
    """

    source: str
    models: dict[str, Twin]

    def difference(self, twin: str, figure: str = "accuracy") -> Estimate:
        """The experts' figure less that of `"dense"` or `"wide"`, seed by seed."""
        pairs = zip(self.models["experts"].runs, self.models[twin].runs)
        return Estimate.of([own[figure] - other[figure] for own, other in pairs])

    @property
    def sentence(self) -> str:
        """What was found; a 95% interval with 0 (Student's t) is no difference."""
        experts, wide = self.models["experts"], self.models["wide"]
        over = f"Over {len(experts.runs)} seeds"
        if len(experts.runs) == 1:
            over = "With one seed, which gives no error,"
        return (
            f"{over} on {self.source} the experts {self._found('dense')}, and "
            f"{self._found('wide')} at {experts.mflops / wide.mflops:.2f} of its FLOPs."
        )

    def _found(self, twin):
        mean, error = difference = self.difference(twin)
        seeds = len(self.models[twin].runs)
        # A few seeds may differ by the same few images: that is no error of 0.
        unclear = error is not None and (
            error < _NO_ERROR
            or abs(mean) < error * _STUDENT[min(seeds - 2, len(_STUDENT) - 1)]
        )
        if unclear or not mean:
            points = difference.text(sign="+")
            return f"show no difference from {_EQUAL[twin]} ({points} points)"
        size, more = Estimate(abs(mean), error).text(), "more" if mean > 0 else "less"
        return f"are {size} points {more} accurate than {_EQUAL[twin]}"

    def table(self) -> "Table":
        """A table for `rich.print`: the models, then the experts against each twin."""
        own, rows, last, at_end = self.models["experts"], [], [], []
        for name, twin in self.models.items():
            values = {x: Estimate.of([run[x] for run in twin.runs]) for x in _FIGURES}
            step = f"{twin.step_ms:.2f}" if twin.step_ms else ""
            costs = [f"{twin.parameters:,}", f"{twin.mflops:.4g}", step]
            rate = f"{twin.learning_rate:g}"
            rows.append([name, *costs, rate, *(x.text(k) for k, x in values.items())])
            tried = sorted(map(float, twin.tried))
            if float(rate) in (tried[0], tried[-1]) and len(tried) > 1:
                at_end.append(name)
            if name in _EQUAL:
                pairs = [(x.parameters, x.mflops, x.step_ms or 0) for x in (own, twin)]
                costs = [f"x {x / y:.2f}" if y else "" for x, y in zip(*pairs)]
                differences = [self.difference(name, x).text(x, "+") for x in _FIGURES]
                last.append([f"against {name}", *costs, "", *differences])
        title, caption = f"Twins on {self.source}", _CAPTION
        if at_end:
            caption += f" The best rate is an end of the list for {', '.join(at_end)}."
        return numbers_table(title, _HEAD, rows, last, caption=caption)

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        return {
            "sentence": self.sentence,
            "source": self.source,
            "models": {name: twin._asdict() for name, twin in self.models.items()},
            "differences": {
                name: {x: self.difference(name, x)._asdict() for x in _FIGURES}
                for name in _EQUAL
            },
        }


def twins(
    recipe: Recipe,
    folder: str | os.PathLike,
    seeds: int = 3,
    learning_rates: Sequence[float] | None = None,
    held_out: float = 0.1,
    timed_steps: int = 20,
    data_dir: str | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> Twins:
    """Trains a model with experts and its dense twins, to see what the experts gain.

    `"dense"` has the FLOPs of the recipe's model and `"wide"` its parameters, both by
    the `mlp_dim` of all blocks. Models of a seed see the same batches, so differences
    are taken seed by seed. Each model tries the same learning rates with the first
    seed; images held out of the training split choose one. At the end the chosen models
    read the test split, once.

    Started again, it goes on where it ended: runs with the same settings are not
    repeated. Twins have the recipe's groups of weights, less those that match none of
    theirs.

    Args:
        recipe: a recipe of images with one class each, for a model with experts that
            starts from random weights.
        folder: folder of the runs, and of the result, `twins.json`. It may have runs
            of other seeds and learning rates, and of no other settings.
        seeds: number of seeds, from the recipe's on.
        learning_rates: peak learning rates to try; by default half of the recipe's,
            that, and twice as much.
        held_out: number of training images to choose by, or below 1 their share.
        timed_steps: number of training steps that are timed; 0 for none.
        data_dir: folder of TensorFlow Datasets.
        progress: function of (done, total, what is done), called before each run and
            after each epoch.

    Returns:
        A `Twins` with the figures of each model, `table()` and `sentence`. Standard
        errors are over seeds, on one test set.

    Example:

    ```python
    recipe = training.load_recipe("vmoe_digits")
    print(training.twins(recipe, "runs/twins").sentence)
    ```
    """
    seeds = check_integer("seeds", seeds)
    timed_steps = check_integer("timed_steps", timed_steps, 0)
    peak, preset = recipe.schedule.learning_rate, recipe.model.preset
    rates = [peak / 2, peak, 2 * peak] if learning_rates is None else learning_rates
    # As in the names of folders.
    rates = [float(f"{check_positive('learning_rates', x):g}") for x in rates]
    if not rates or len({*rates}) < len(rates):
        raise unfit("one or more different learning_rates", learning_rates=rates)
    if not isinstance(recipe.objective, Classification):
        raise unfit("the objective classification", objective=recipe.objective.name)
    if recipe.model.load_weights and not is_architecture(preset):
        expected = "a model that starts from random weights, as its twins do"
        hint = "(--recipe-set model.load_weights=false gives it some)"
        raise unfit(f"{expected} {hint}", load_weights=True, preset=preset)
    if rank_and_world_size()[1] > 1:
        raise unfit("a single process", processes=rank_and_world_size()[1])
    num_classes = recipe.objective.num_classes(recipe.data, data_dir)
    configs = twin_models(recipe, num_classes)
    own = _with_held_out(recipe, held_out, data_dir)
    recipes = {name: _twin(own, x, num_classes) for name, (x, _) in configs.items()}
    for each in recipes.values():
        # What cannot be built fails now, and not after the others' runs.
        each.abstract_model(num_classes)
    total = len(recipes) * (len(rates) + 2 * seeds - 1) + bool(timed_steps)
    runs = _Runs(recipe, recipes, Path(folder) / "runs", data_dir, total, progress)
    number = own.data.to_dict()["held_out"]
    runs.check_settings(number)
    tried = {
        name: {rate: runs.trained(name, rate, recipe.seed) for rate in rates}
        for name in recipes
    }
    chosen = {name: _best(name, records) for name, records in tried.items()}
    each = [(name, recipe.seed + n) for n in range(seeds) for name in recipes]
    trained = [runs.trained(name, chosen[name], seed) for name, seed in each]
    for (name, seed), record in zip(each, trained):
        if "nll" not in record:
            expected = f"learning_rates (--rates) with which {name} never diverges"
            raise unfit(expected, learning_rate=chosen[name], seed=seed)
    # All choices are made before the first look at the test images.
    tested = {name: [] for name in recipes}
    for (name, seed), record in zip(each, trained):
        figures = runs.tested(name, chosen[name], seed)
        tested[name].append({**figures, "loss": record["loss"]})
    times = runs.step_times(chosen, num_classes, timed_steps) if timed_steps else {}
    found = {
        name: Twin(
            recipes[name].model.to_dict(),
            cost.parameters,
            1e3 * cost.gflops,
            chosen[name],
            {f"{rate:g}": record.get("nll") for rate, record in tried[name].items()},
            tested[name],
            times.get(name),
        )
        for name, (_, cost) in configs.items()
    }
    result = Twins(str(recipe.data.source), found)
    about = {"recipe": recipe.to_dict(), "held_out": number}
    about |= {"backend": keras.backend.backend(), "versions": runs.versions}
    write_json(Path(folder) / "twins.json", {**result.to_dict(), **about})
    return result


# Models


def twin_models(
    recipe: Recipe, num_classes: int | None
) -> dict[str, tuple[ModelConfig, Description]]:
    """The recipe's model, and dense ones of equal FLOPs and of equal parameters."""
    config = dataclasses.replace(recipe.model, load_weights=False)

    def described(overrides):
        own = {"num_classes": num_classes, **json_copy("overrides", overrides)}
        with models.resolve(
            config.preset, own, load_weights=False, counts_only=True
        ) as blueprint:
            return blueprint, blueprint.describe()

    blueprint, cost = described(config.overrides)
    moe = moe_config(blueprint.config.get("moe"))
    if moe is None or not moe.moe_layers:
        raise unfit("a model with experts in its blocks", preset=config.preset)
    if blueprint.task_config.get("multi_label"):
        raise unfit("a model of one class per image", multi_label=True)
    # What is the experts' is left behind.
    others = *argument_names(blueprint.backbone), *argument_names(blueprint.task)
    of_experts = {*moe_names()} - {*others}
    kept = {k: x for k, x in config.overrides.items() if k not in of_experts}
    if blueprint.config.get("token_mixer") == MUMOE:
        kept["token_mixer"] = "mlp"

    def dense(mlp_dim):
        overrides = {**kept, "moe": None, "mlp_dim": mlp_dim}
        own = dataclasses.replace(config, overrides=overrides)
        return own, described(overrides)[1]

    def equal(count):
        # Linear in `mlp_dim`.
        target, (first, second) = count(cost), (count(dense(x)[1]) for x in (1, 2))
        exact = 1 + (target - first) / (second - first)
        for multiple in _MULTIPLES:
            twin = dense(multiple * max(round(exact / multiple), 1))
            if abs(count(twin[1]) / target - 1) < _ROUNDING:
                break
        return twin

    return {
        "experts": (config, cost),
        "dense": equal(lambda cost: cost.gflops),
        "wide": equal(lambda cost: cost.parameters),
    }


def _twin(recipe, config, num_classes) -> Recipe:
    """The recipe with another model, and without groups of weights that it lacks."""
    groups = given = recipe.optimizer.groups
    if given and config != dataclasses.replace(recipe.model, load_weights=False):
        make = recipe.objective.new_model
        model = make(config, num_classes, recipe.seed, models.abstract)
        paths, groups = [x.path for x in model.trainable_variables], []
        for group in given:
            try:
                group_factors([*groups, group], paths)
            except ValueError:
                continue
            groups.append(group)
    optimizer = recipe.optimizer.replace(groups=groups)
    return dataclasses.replace(recipe, model=config, optimizer=optimizer)


# Data


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeldOut(ImageData):
    """Images of which some of the training split are those to evaluate on."""

    held_out: int

    def hold_out(self, excluded: np.ndarray, data_dir: str | None) -> None:
        """Chooses the images among those that are not excluded."""
        count = data.num_examples(self.source, self.train_split, data_dir)
        kept = np.setdiff1d(np.arange(count), excluded)
        own = np.random.default_rng(0).choice(kept, self.held_out, replace=False)
        both = np.union1d(excluded, own), np.setdiff1d(np.arange(count), own)
        self._left_out[data_dir] = both

    def left_out(self, data_dir=None):
        # Not searched for again: a copy of this section would hold nothing out.
        return self._left_out[data_dir]


def _with_held_out(recipe, held_out, data_dir) -> Recipe:
    """The recipe that evaluates on images which it does not train on."""
    config, number = recipe.data, check_positive("held_out", held_out)
    excluded, _ = config.left_out(data_dir)
    count = data.num_examples(config.source, config.train_split, data_dir, excluded)
    size = round(number * count) if number < 1 else round(number)
    if not 0 < size <= count - config.batch_size or number not in (size, number % 1):
        expected = f"some of {count} training images beside a batch"
        raise unfit(expected, held_out=held_out, batch_size=config.batch_size)
    settings = {**config.to_dict(), "test_split": config.train_split}
    section = _HeldOut(**settings, held_out=size)
    section.hold_out(excluded, data_dir)
    return dataclasses.replace(recipe, data=section)


# Runs


class _Runs:
    """The runs of a comparison, each in a folder of its own and done once."""

    def __init__(
        self,
        recipe: Recipe,
        recipes: dict[str, Recipe],
        folder: Path,
        data_dir: str | None,
        total: int,
        progress: Callable[[int, int, str], object] | None,
    ):
        self.recipe, self.recipes, self.folder = recipe, recipes, folder
        self.data_dir, self.total, self.progress = data_dir, total, progress
        self.done, self.versions = set(), []

    def show(self, text: str) -> None:
        if self.progress is not None:
            self.progress(len(self.done), self.total, text)

    def trained(self, name: str, rate: float, seed: int) -> dict:
        """Figures on the held-out images; none if training diverged."""
        recipe, folder = self._run(name, rate, seed)
        label = f"{name}, learning rate {rate:g}, seed {seed}"

        def make():
            watch: Any = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: self.show(
                    f"{label}, epoch {epoch + 1} of {watch.params['epochs']}"
                )
            )
            try:
                run = self._train(recipe, folder, [watch])
            except ValueError as error:
                if not isinstance(error.__cause__, NonFiniteLoss):
                    raise
                return {"diverged": str(error)}
            figures = self._figures(run.model, recipe)
            return {**figures, "loss": run.history["loss"][-1]}

        return self._once(label, folder / "run.json", make)

    def tested(self, name: str, rate: float, seed: int) -> dict[str, float]:
        """Figures on the test images of a model that was trained before."""
        recipe, folder = self._run(name, rate, seed)

        def make():
            # Nothing is left to train.
            model = self._train(recipe, folder, ()).model
            figures = self._figures(model, self.recipe)
            if not figures:
                expected = f"finite outputs of {name}, seed {seed}"
                raise unfit(expected, "NaN or Inf for test images")
            return figures

        label = f"{name}, seed {seed}, test images"
        return self._once(label, folder / "test.json", make)

    def step_times(
        self, rates: dict[str, float], num_classes: int | None, rounds: int
    ) -> dict[str, float]:
        """Medians of the times of training steps in ms, with the same batch."""
        own = {name: self._run(name, x, self.recipe.seed) for name, x in rates.items()}
        settings = {"rounds": rounds, "rates": rates}

        def step(model, recipe, batch):
            start = time.perf_counter()
            for _ in range(recipe.optimizer.gradient_accumulation_steps):
                model.train_on_batch(*batch)
            return 1e3 * (time.perf_counter() - start)

        def make():
            arguments, batch, times = {}, None, {name: [] for name in own}
            for name, (recipe, _) in own.items():
                model = recipe.new_model(num_classes)
                # The length of an epoch changes learning rates, and no times.
                recipe.compile(model, steps_per_epoch=10**6)
                if batch is None:
                    batch = next(iter(recipe.datasets(model, self.data_dir).train))
                    batch = [keras.ops.convert_to_numpy(x) for x in batch]
                arguments[name] = model, recipe, batch
                # Compiles.
                step(*arguments[name])
            for number in range(rounds):
                # In turn, since time drifts on a shared machine.
                for name in random.Random(number).sample([*times], len(times)):
                    times[name].append(step(*arguments[name]))
            return {name: statistics.median(values) for name, values in times.items()}

        path = self.folder / "step_times.json"
        # Other rates may be the best by now.
        return self._once("times of training steps", path, make, settings)

    def _run(self, name, rate, seed):
        """Recipe and folder of a run."""
        recipe = self.recipes[name]
        schedule = recipe.schedule.replace(learning_rate=rate)
        # Shares the data's section, which remembers the images that are left out.
        recipe = dataclasses.replace(recipe, seed=seed, schedule=schedule)
        return recipe, self.folder / f"{name}-rate{rate:g}-seed{seed}"

    def check_settings(self, held_out: int) -> None:
        """Refuses a folder that has runs of other settings."""
        backend, path = keras.backend.backend(), self.folder / "settings.json"
        settings = settings_of_runs(self.recipe)
        settings |= {"held_out": held_out, "backend": backend}
        for name in ("schedule.learning_rate", "seed"):
            # Each run has its own.
            del settings[name]
        changes = different_settings(self._read(path) or settings, settings)
        runs = self.folder.glob("*-seed*")
        if changes and any(
            (x / "run.json").exists() or list_checkpoints(x / "checkpoints")
            for x in runs
        ):
            expected = f"the settings of the runs in {self.folder}, or another folder"
            raise unfit(f"{expected} (--output)", *changes.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def _train(self, recipe, folder, callbacks):
        options = {"data_dir": self.data_dir, "verbose": 0, "callbacks": callbacks}
        options |= {"checkpoint_dir": folder / "checkpoints", "keep_checkpoints": 1}
        return train(recipe, **options)

    def _read(self, path) -> dict:
        """What a file has, or nothing if it is not there or damaged."""
        try:
            return json.loads(read_text(path, self.folder))
        except (OSError, ValueError):
            return {}

    def _once(self, label, path, make, settings=None) -> Any:
        """What the file has for these settings, or else what is made for them."""
        record = self._read(path)
        is_done = {"result", "versions"} <= record.keys()
        if not is_done or record.get("settings") != settings:
            self.show(label)
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {"settings": settings, "result": make(), "versions": versions()}
            write_json(path, record)
        if record["versions"] not in self.versions:
            self.versions.append(record["versions"])
        self.done.add(path)
        return record["result"]

    def _figures(self, model, recipe) -> dict[str, float]:
        """Accuracy, NLL and ECE on the images that a recipe evaluates on."""
        batches = recipe.datasets(model, self.data_dir).test
        with data.reading_errors():
            outputs, labels = evaluation.extract_features(model, batches, verbose=0)
        if not np.isfinite(outputs.astype("float32")).all():
            # The last step broke the weights: no figures, as of a run that diverged.
            return {}
        outputs, labels = outputs.astype("float32"), labels.argmax(axis=-1)
        if model.output_activation is None:
            outputs = keras.ops.convert_to_numpy(keras.ops.softmax(outputs))
        result = evaluation.calibration(outputs, labels)
        accuracy = float((outputs.argmax(axis=-1) == labels).mean())
        return {"accuracy": accuracy, "nll": result.nll, "ece": result.ece}


def _best(name, records) -> float:
    finite = {
        rate: record["nll"] for rate, record in records.items() if "nll" in record
    }
    if not finite:
        expected = f"a learning rate with which {name} does not diverge"
        raise unfit(expected, learning_rates=[*records])
    return min(finite, key=finite.__getitem__)
