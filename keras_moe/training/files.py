"""Small files that are there as a whole."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file as a whole, or leaves the one that is there."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON file as a whole, or leaves the one that is there."""
    write_text(path, json.dumps(value, indent=2) + "\n")
