"""A study: trainings that are each done once, their seeds, progress and results."""

import argparse
import hashlib
import json
import statistics
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from keras_moe.cli.result import Result
from keras_moe.files import json_text, new_file, write_json

# Tells how far a run is.
Tell = Callable[[str], None]


class Diverged(Exception):
    """The loss of a run is not finite."""

    def __init__(self, epoch: int, loss: float):
        super().__init__(epoch, loss)
        self.epoch, self.loss = epoch, loss


class Run(NamedTuple):
    """One training of a study.

    Attributes:
        name: name of its configuration, and of its file.
        seed: seed of weights, noise and order.
        settings: what its result follows from, besides the seed and the study's
            settings.
        make: function that trains. It is given a function that shows a text beside the
            bar, and returns a result that JSON has, and arrays by name.
        label: name for people; None for `name`.
    """

    name: str
    seed: int
    settings: dict
    make: Callable[[Tell], tuple[dict, dict[str, np.ndarray]]]
    label: str | None = None


class Study:
    """A folder with one file for each finished run, and the results of all.

    A run is done once: its file's name has a digest of all settings, so that other
    settings make other files, and an interrupted study resumes at the run that was
    interrupted. A damaged file is no result.
    """

    def __init__(
        self, folder: Path, settings: dict, console: Console, restart: bool = False
    ):
        self.folder, self.console = folder, console
        self.settings = plain(settings)
        self.runs = folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        if restart:
            for path in (*self.runs.glob("*.json"), *self.runs.glob("*.npz")):
                path.unlink()

    def path(self, run: Run) -> Path:
        """The JSON file of a run; arrays are beside it."""
        settings = self.settings_of(run)
        name = "".join(x if x.isalnum() or x in "-_" else "_" for x in run.name)
        return self.runs / f"{name}-seed{run.seed}-{digest(settings)}.json"

    def settings_of(self, run: Run) -> dict:
        """All that the result of a run follows from."""
        own = {"name": run.name, "seed": run.seed, **run.settings}
        return plain({**self.settings, **own})

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

    def finish(self, run: Run, tell: Tell = lambda text: None) -> dict:
        """The result of a run, which is made unless it is there."""
        result = self.finished(run)
        if result is not None:
            return result
        try:
            result, arrays = run.make(tell)
        except Diverged as error:
            raise ValueError(
                f"{run.label or run.name} with seed {run.seed} diverged in epoch "
                f"{error.epoch} (loss={error.loss}); try a smaller --learning-rate"
            ) from error
        path, result = self.path(run), plain(result)
        if arrays:
            with new_file(path.with_suffix(".npz")) as file:
                np.savez_compressed(file, **arrays)
        # The last: it says that the run is whole.
        settings = self.settings_of(run)
        # Without NaN, as JSON has it.
        stored = json.loads(json_text(result))
        record = {"settings": settings, "arrays": list(arrays), "result": stored}
        write_json(path, {**record, "digest": digest(stored)})
        return result

    def finish_all(self, runs: Sequence[Run]) -> list[dict]:
        """The results of runs in order, with a bar."""
        results = []
        count = sum(self.finished(run) is not None for run in runs)
        if count:
            self.console.print(f"{count} of {len(runs)} runs were finished before")
        with progress_bar(self.console) as progress:
            task = progress.add_task("runs", total=len(runs))
            for run in runs:
                label = f"{run.label or run.name}, seed {run.seed}"

                def tell(text, label=label):
                    progress.update(task, description=f"{label}, {text}")

                progress.update(task, description=label)
                results.append(self.finish(run, tell))
                progress.advance(task)
        return results

    @property
    def results_path(self) -> Path:
        """The file with the results of all parts."""
        return self.folder / "results.json"

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
    """A part of a study, with its own runs, tables and pictures.

    Args:
        study: the study.
    """

    def __init__(self, study: Study):
        self.study = study

    def results(self) -> dict:
        """The results, JSON-serialisable."""
        raise NotImplementedError

    def show(self, results: dict, console: Console) -> None:
        """Prints the results as tables."""
        raise NotImplementedError

    def draw(self, every: dict) -> list[Path]:
        """Draws pictures of the results; by default none.

        Args:
            every: results of all parts so far, by name.
        """
        return []


def run_parts(study: Study, parts: dict[str, Part]) -> Result:
    """Does parts of a study one after the other; those of earlier commands stay."""
    every = study.earlier_results()
    for name, part in parts.items():
        results = every[name] = plain(part.results())
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
    return Result(every, lambda console: print_path(study.results_path, console))


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of every run, see `parser.add_run`."""
    names = ("epochs", "batch_size", "learning_rate")
    return {name: getattr(args, name) for name in names}


def print_path(path: Path, console: Console) -> None:
    """Prints where the results are."""
    console.print(f"results   {path}", highlight=False, soft_wrap=True)


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


def digest(settings: dict) -> str:
    """A name for settings, which other settings do not have."""
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


def percent(value: dict[str, float], digits: int = 1) -> str:
    """A spread of shares as text: mean and standard deviation in percent."""
    return f"{100 * value['mean']:.{digits}f}±{100 * value['std']:.{digits}f}"


def plus_minus(value: dict[str, float], digits: int = 2) -> str:
    """A spread as text: mean and standard deviation."""
    return f"{value['mean']:.{digits}f}±{value['std']:.{digits}f}"


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, or None if they are not there or not whole."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except (
        OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error,
        # A flag of the archive asks for a password, or for an unknown compression.
        RuntimeError,
    ):  # fmt: skip
        return None
