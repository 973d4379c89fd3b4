"""Small files that are there as a whole, and JSON that is refused by name."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file as a whole, or leaves the one that is there."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON file as a whole, or leaves the one that is there."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict:
    """A dict in a JSON file, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"Expected a JSON file; received: {path}") from error
    except ValueError as error:
        raise ValueError(f"Expected JSON in {path}; received: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"Expected a dict in {path}; received: {value!r:.100}")
    return value
