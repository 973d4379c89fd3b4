"""Results of studies: stored as JSON as they come, and found again."""

import hashlib
import json
import statistics
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from keras_moe.files import new_file


def progress_of_runs(console: Console) -> Progress:
    """A bar with what runs, how many are done, and the time."""
    return Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def digest(settings: dict) -> str:
    """A name for settings, which other settings do not have."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def spread(values: list[float]) -> dict[str, float]:
    """Mean, sample standard deviation (0 for one value) and range."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
    }


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def read_result(path: Path, settings: dict) -> Any:
    """A stored result, or None if there is none for these settings."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["result"] if record["settings"] == settings else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def earlier_results(path: Path, backend: str) -> dict:
    """The results that are there, of this backend: parts of an earlier command."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        results = {}
    if not isinstance(results, dict) or results.get("backend") != backend:
        return {"backend": backend}
    return results


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes an .npz file as a whole, or not at all."""
    with new_file(path) as file:
        np.savez_compressed(file, **arrays)


def read_arrays(path: Path) -> dict[str, Any] | None:
    """The arrays that a run kept, or None if they are not there or not whole."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def check_converged(history: dict[str, list[float]]) -> None:
    """Raises ValueError if the last loss of a run is not finite."""
    if not np.isfinite(history["loss"][-1]):
        raise ValueError(
            "Expected a run that converges; received: a loss that is not finite. "
            "Try a smaller --learning-rate"
        )
