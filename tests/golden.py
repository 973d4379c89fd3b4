"""Reads the numbers that reference implementations gave (see data/golden)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "data" / "golden"


def load(case: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns arrays and settings of a case such as `"01_token_choice/k1_bpr_cap3"`."""
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "config"}
        config = json.loads(str(stored["config"])) if "config" in stored else {}
    return arrays, config


def cases(pattern: str) -> list[str]:
    """Returns the names of the cases that match, such as `"01_token_choice/k*"`."""
    names = [path.relative_to(FOLDER) for path in FOLDER.glob(f"{pattern}.npz")]
    if not names:
        raise FileNotFoundError(f"no golden case matches {pattern!r}")
    return sorted(name.with_suffix("").as_posix() for name in names)


def part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays below a prefix, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
