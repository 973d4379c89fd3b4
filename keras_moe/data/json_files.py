"""Dicts in JSON files, which are written as a whole and refused by name."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Writes a file as a whole, or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


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
