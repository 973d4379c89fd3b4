"""Results of studies: stored as JSON as they come, and found again."""

import hashlib
import json
import os
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn


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


def write_json(path: Path, value: Any) -> None:
    """Writes a file as a whole, or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_result(path: Path, settings: dict) -> Any:
    """A stored result, or None if there is none for these settings."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["result"] if record["settings"] == settings else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
