"""The manifest of a checkpoint: its files with their sums, and the sum of itself."""

import hashlib
import json
from collections.abc import Collection
from typing import Any

NAME = "manifest.json"
STATE = "state.json"
FORMAT = 1
# The entries of the files, and the kinds that JSON has for them.
_MANIFEST = {"format": int, "step": int, "files": dict, "sha256": str}
_STATE = {"state": dict, "variables": dict}


def manifest_text(step: int, files: dict[str, dict]) -> str:
    """The text of a manifest."""
    body = {"format": FORMAT, "step": step, "files": files}
    return _json({**body, "sha256": _digest_of(body)})


def read_manifest(path: Any) -> dict[str, Any]:
    """The manifest in a checkpoint's folder."""
    manifest = read_object(path / NAME, _MANIFEST)
    written = manifest.pop("sha256")
    if _digest_of(manifest) != written:
        raise ValueError(f"{NAME} is not what was written")
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not known")
    # One that was copied to another name would stand in for a step of its run.
    if path.name.startswith("step-") and path.name != step_name(manifest["step"]):
        raise ValueError(f"{NAME} is of step {manifest['step']}")
    if STATE not in manifest["files"]:
        raise ValueError(f"{NAME} names no {STATE}")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= set(entry):
            raise ValueError(f"{NAME} has no bytes and sha256 of {name}")
    return manifest


def read_state(path: Any) -> tuple[dict, dict[str, list[dict]]]:
    """The state of a checkpoint, and its variables by group."""
    stored = read_object(path / STATE, _STATE)
    for group, variables in stored["variables"].items():
        if not _are_variables(variables):
            raise ValueError(f"{STATE} has no list of the variables of {group!r}")
    return stored["state"], stored["variables"]


def read_object(path: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """A JSON object whose entries are of the kinds that belong to their names."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    received = (
        {x: type(content[x]).__name__ if x in content else None for x in kinds}
        if isinstance(content, dict)
        else type(content).__name__
    )
    expected = {name: kind.__name__ for name, kind in kinds.items()}
    if received != expected:
        raise ValueError(f"{path.name} has not {expected}; received: {received}")
    return content


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def entry_of(content: bytes) -> dict[str, Any]:
    """The entry of a file in the manifest."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def check_names(expected: Collection[str], names: Collection[str]) -> None:
    """Raises ValueError if files are missing, or there are others."""
    if missing := sorted(set(expected) - set(names)):
        raise ValueError(f"{', '.join(missing)} is not there")
    if further := sorted(set(names) - set(expected)):
        raise ValueError(f"{NAME} does not name {', '.join(further)}")


def _are_variables(entries):
    return isinstance(entries, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("path"), str)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        for entry in entries
    )


def _digest_of(value):
    return hashlib.sha256(_json(value).encode()).hexdigest()


def _json(value):
    return json.dumps(value, sort_keys=True, allow_nan=False)
