"""Small files that are there as a whole, and JSON that is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

from keras_moe.data.json_schema import find_fault


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


def read_json(path: Path, description: Any) -> dict:
    """The dict in a JSON file, if it is as described.

    Args:
        path: of the file.
        description: of `keras_moe.data.json_schema`.

    Raises:
        ValueError: if there is no such file, it is no JSON, or a value in it is not as
            described; with the file's name.
        OSError: if it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"Expected a JSON file; received: {path}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {path}; received: {error}") from error
    fault = find_fault(value, description)
    if fault is not None:
        raise ValueError(fault.message(path))
    return value
