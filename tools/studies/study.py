"""A study: trainings that are each done once, their seeds, progress and results."""

import argparse
import hashlib
import json
import math
import statistics
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from keras_moe._files import json_text, new_file, write_json
from keras_moe.cli._arguments import (
    Result,
    add_count,
    add_length,
    add_output,
    positive,
)

# Shows how far a run is.
OnProgress = Callable[[str], None]


class Diverged(Exception):
    """The loss of a run is not finite."""

    def __init__(self, epoch: int, loss: float):
        super().__init__(epoch, loss)
        self.epoch, self.loss = epoch, loss


class Watch(keras.callbacks.Callback):
    """Shows the loss of each epoch, and ends a run whose loss is not finite."""

    def __init__(
        self, on_progress: OnProgress, on_epoch: Callable[[], Any] = lambda: None
    ):
        super().__init__()
        self.on_progress, self.on_epoch = on_progress, on_epoch

    def on_epoch_end(self, epoch, logs=None):
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise Diverged(epoch + 1, loss)
        epochs = self.params["epochs"]
        self.on_progress(f"epoch {epoch + 1} of {epochs}, loss {loss:.3f}")
        self.on_epoch()


class Run(NamedTuple):
    """One training of a study.

    Attributes:
        name: name of its file.
        seed: seed of weights, noise and order.
        settings: what its result follows from, besides the seed and the study's
            settings.
        make: function that trains. It is given a function that shows a text beside the
            bar, and returns a result that JSON has, and arrays by name.
        label: name of its row; None for `name`.
    """

    name: str
    seed: int
    settings: dict
    make: Callable[[OnProgress], tuple[dict, dict[str, np.ndarray]]]
    label: str | None = None

    @property
    def row(self) -> str:
        """The name of its row."""
        return self.label or self.name


class Study:
    """A folder with one file for each finished run, and the results of all.

    A run is done once: its file's name has a digest of all settings, so that other
    settings make other files, and an interrupted study resumes at the run that was
    interrupted. A damaged file counts as missing.
    """

    def __init__(
        self, folder: Path, settings: dict, console: Console, restart: bool = False
    ):
        self.folder, self.console = folder, console
        self.settings = as_json(settings)
        self.results_path = folder / "results.json"
        self.runs = folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        if restart:
            for path in (*self.runs.glob("*.json"), *self.runs.glob("*.npz")):
                path.unlink()

    def path(self, run: Run) -> Path:
        """The JSON file of a run; its arrays are beside it."""
        name = "".join(x if x.isalnum() or x in "-_" else "_" for x in run.name)
        return self.runs / f"{name}-seed{run.seed}-{digest(self.settings_of(run))}.json"

    def settings_of(self, run: Run) -> dict:
        """All that the result of a run follows from."""
        own = {"name": run.name, "seed": run.seed, **run.settings}
        return as_json({**self.settings, **own})

    def finished(self, run: Run) -> dict | None:
        """The result of a run whose files are there and whole."""
        path = self.path(run)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            result, arrays = record["result"], set(record["arrays"])
            if record["settings"] != self.settings_of(run):
                return None
            if record["digest"] != digest(result):
                return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        if not isinstance(result, dict):
            return None
        if arrays and set(read_arrays(path.with_suffix(".npz")) or ()) != arrays:
            return None
        return result

    def arrays(self, run: Run) -> dict[str, np.ndarray]:
        """The arrays of a finished run."""
        return read_arrays(self.path(run).with_suffix(".npz")) or {}

    def finish(self, run: Run, on_progress: OnProgress = lambda text: None) -> dict:
        """The result of a run, which is made unless it is there."""
        result = self.finished(run)
        if result is not None:
            return result
        try:
            result, arrays = run.make(on_progress)
        except Diverged as error:
            raise ValueError(
                f"{run.row} with seed {run.seed} diverged in epoch {error.epoch} "
                f"(loss={error.loss}); try a smaller --learning-rate"
            ) from error
        path, result = self.path(run), as_json(result)
        if arrays:
            with new_file(path.with_suffix(".npz")) as file:
                np.savez_compressed(file, **arrays)
        # Last, since this file says that the run is whole; without NaN, as JSON has it.
        stored = json.loads(json_text(result))
        record = {
            "settings": self.settings_of(run),
            "arrays": list(arrays),
            "result": stored,
            "digest": digest(stored),
        }
        write_json(path, record)
        return result

    def finish_all(self, runs: Sequence[Run]) -> dict[str, list[dict]]:
        """The results of runs by row, in order, with a bar."""
        results = {}
        count = sum(self.finished(run) is not None for run in runs)
        if count:
            self.console.print(f"{count} of {len(runs)} runs were finished before")
        with progress_bar(self.console) as progress:
            task = progress.add_task("runs", total=len(runs))
            for run in runs:
                label = f"{run.row}, seed {run.seed}"

                def on_progress(text, label=label):
                    progress.update(task, description=f"{label}, {text}")

                progress.update(task, description=label)
                results.setdefault(run.row, []).append(self.finish(run, on_progress))
                progress.advance(task)
        return results

    def earlier_results(self) -> dict:
        """The results of parts of an earlier command with the same settings.

        The settings are those of every run, versions among them. A part that was done
        with other settings is not mixed with those that are done now.
        """
        own = {"backend": self.settings["backend"], "settings": self.settings}
        try:
            results = json.loads(self.results_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            results = None
        if not isinstance(results, dict) or results.get("settings") != self.settings:
            return own
        parts = {name: part for name, part in results.items() if isinstance(part, dict)}
        return {**parts, **own}


class Part:
    """A part of a study, with its own runs, tables and pictures."""

    def __init__(self, study: Study):
        self.study = study

    def results(self) -> dict:
        """The results, JSON-serialisable."""
        raise NotImplementedError

    def show(self, results: dict, console: Console) -> None:
        """Prints the results as tables."""
        raise NotImplementedError

    def draw(self, every: dict) -> list[Path]:
        """Draws pictures, given the results of all parts so far by name."""
        return []


def run_parts(study: Study, parts: dict[str, Part]) -> Result:
    """Does parts of a study one after the other; those of earlier commands stay."""
    every = study.earlier_results()
    for name, part in parts.items():
        results = every[name] = as_json(part.results())
        # Each at once: the next may be interrupted.
        write_json(study.results_path, every)
        part.show(results, study.console)
        try:
            pictures = part.draw(every)
        except ImportError as error:
            # Pictures need an extra; the results are there without.
            study.console.print(f"no pictures: {error}")
            continue
        for picture in pictures:
            study.console.print(f"picture   {picture}")
    return Result(every, (f"results   {study.results_path}",))


def add_parts(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds `--parts`."""
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help="The parts of the study to run.",
    )


def add_numbers(
    parser: Any, name: str, metavar: str, text: str, default: list[float] | None = None
) -> None:
    """Adds an argument of one or more numbers above 0."""
    options: dict[str, Any] = {"metavar": metavar, "default": default, "help": text}
    parser.add_argument(name, type=positive, nargs="+", **options)


def add_training(
    parser: argparse.ArgumentParser,
    folder: str,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
) -> None:
    """Adds the arguments of runs, which all studies have."""
    group = parser.add_argument_group("runs")
    add_count(group, "--seeds", "The number of seeds from which each model trains.", 3)
    add_length(group, epochs, batch_size, learning_rate)
    add_output(group, "The folder of the results.", Path("runs") / folder)
    group.add_argument(
        "--restart", action="store_true", help="Delete the finished runs first."
    )


def check_parts(args: argparse.Namespace, **parts: str) -> None:
    """Refuses options of parts that do not run: names of options with their parts."""
    for name, part in parts.items():
        if getattr(args, name) is not None and part not in args.parts:
            raise ValueError(
                f"Expected the part {part} with --{name.replace('_', '-')}; received: "
                f"--parts {' '.join(args.parts)}"
            )


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of every run, see `add_training`."""
    names = ("epochs", "batch_size", "learning_rate")
    return {name: getattr(args, name) for name in names}


def compile_with_cosine(model: keras.Model, steps: int, learning_rate: float) -> None:
    """Compiles a model with AdamW, 10% warm-up and cosine decay."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=learning_rate, warmup_steps=steps // 10
    )
    # Keras annotates a number only.
    rate: Any = schedule
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.05, global_clipnorm=1.0)
    model.compile(optimizer=optimizer)


def new_table(title: str, *columns: str, **options: Any) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(title=title, **options)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def progress_bar(console: Console) -> Progress:
    """A bar with what runs, how many are done, and the time."""
    return Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def digest(settings: dict | list) -> str:
    """A short name that differs for different settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample standard deviation (0 for one value) and range."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
    }


def spread_of(results: Sequence[dict], name: str) -> dict[str, float]:
    """The spread of a figure over runs."""
    return spread([result[name] for result in results])


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose largest logit is the label's."""
    return float((logits.argmax(axis=-1) == labels).mean())


def percent(value: dict[str, float], digits: int = 1) -> str:
    """A spread of shares as text: mean and standard deviation in percent."""
    return f"{100 * value['mean']:.{digits}f}±{100 * value['std']:.{digits}f}"


def plus_minus(value: dict[str, float], digits: int = 2) -> str:
    """A spread as text: mean and standard deviation."""
    return f"{value['mean']:.{digits}f}±{value['std']:.{digits}f}"


def as_json(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, or None if they are not there or not whole."""
    try:
        # NumPy leaves a damaged file open that it has opened itself.
        with (
            open(path, "rb") as opened,
            np.load(opened, allow_pickle=False) as stored,
        ):
            return dict(stored)
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        # A flag of the archive asks for a password, or for an unknown compression.
        RuntimeError,
    ):
        return None


def weights_as_arrays(layer: keras.layers.Layer) -> dict[str, np.ndarray]:
    """The weights of a model, or of its backbone, as the arrays of a run."""
    weights = layer.get_weights()
    return {f"w{index}": value for index, value in enumerate(weights)}


def arrays_as_weights(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The weights of a model, of which `weights_as_arrays` made arrays."""
    return [arrays[f"w{index}"] for index in range(len(arrays))]
