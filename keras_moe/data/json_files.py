"""JSON files that are refused by name."""

import json
from pathlib import Path


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
