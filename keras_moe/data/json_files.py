"""JSON files that are refused by name."""

import json
from pathlib import Path
from typing import Any

from keras_moe.data.json_schema import find_fault


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
