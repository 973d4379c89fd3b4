"""The presets that ship with the library: one JSON file each."""

import copy
import functools
import json
from pathlib import Path

from keras_moe.models.variants import VARIANTS

# Inside the wheel the files lie in the package, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_files(folder: str) -> dict[str, Path]:
    """The JSON files of a folder that ships with the library, by name."""
    folders = (_PACKAGE / folder, _PACKAGE.parent / folder)
    found = next(path for path in folders if path.is_dir())
    return {path.stem: path for path in sorted(found.glob("*.json"))}


def builtin_presets() -> dict[str, dict]:
    """Every built-in preset by name.

    Each is a dict with `description`, `source`, the class names `backbone` and
    `task`, and their arguments `config` (the variant's sizes included) and
    `task_config`; and `class_names` where its classes have names. The caller may
    change what it gets.
    """
    return copy.deepcopy(_read_presets())


@functools.cache
def _read_presets():
    presets = {}
    for name, path in shipped_files("presets").items():
        preset = json.loads(path.read_text())
        sizes = VARIANTS[preset["variant"]].config()
        preset["config"] = {**sizes, **preset["config"]}
        presets[name] = preset
    return presets
