"""Folders of new presets, checked before the work that saving would lose."""

import os
from pathlib import Path

from keras_moe.checks import check_path
from keras_moe.models.preset_folder import is_preset


def check_target(source: str, output: str | os.PathLike) -> None:
    """Refuses a folder to which no preset can be saved, and the source."""
    check_path("source", source)
    check_path("output", output)
    target, origin = Path(output).expanduser().resolve(), Path(source).expanduser()
    if target == origin.resolve() or (
        target.exists() and origin.exists() and target.samefile(origin)
    ):
        raise ValueError(
            "Expected another folder than the source, which saving would replace; "
            f"received: output={str(output)!r}, source={source!r}"
        )
    is_other = target.is_dir() and any(target.iterdir()) and not is_preset(target)
    if is_other or (target.exists() and not target.is_dir()):
        raise ValueError(
            f"Expected a new folder or an older preset; received: {output}"
        )
    above = next(path for path in target.parents if path.exists())
    if not above.is_dir():
        raise ValueError(
            f"Expected a folder to write {output} to; received: {above}, a file"
        )
