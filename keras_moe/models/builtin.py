"""The presets that ship with the library: one JSON file each."""

import copy
import functools
import json
from pathlib import Path

from keras_moe.models.registry import register_presets
from keras_moe.models.variants import VARIANTS

# Inside the wheel the files lie in the package, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_files(folder: str) -> dict[str, Path]:
    """The JSON files of a folder that ships with the library, by name."""
    folders = (_PACKAGE / folder, _PACKAGE.parent / folder)
    path = next(path for path in folders if path.is_dir())
    return {path.stem: path for path in sorted(path.glob("*.json"))}


def builtin_presets() -> dict[str, dict]:
    """Every built-in preset by name.

    Each is a dict with `description`, `source`, `variant`, the class names `backbone`
    and `task`, and their arguments `config` (the variant's sizes included) and
    `task_config`; and `class_names` where its classes have names. The caller may
    change what it gets.
    """
    return copy.deepcopy(_read_presets())


@functools.cache
def _read_presets():
    presets = {}
    for name, path in shipped_files("presets").items():
        preset = json.loads(path.read_text(encoding="utf-8"))
        sizes = VARIANTS[preset["variant"]].config()
        presets[name] = {**preset, "config": {**sizes, **preset["config"]}}
    return presets


def register_builtin_presets() -> None:
    """Makes the built-in presets known by name."""
    register_presets(_read_presets())
