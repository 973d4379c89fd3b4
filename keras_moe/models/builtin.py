"""The presets that ship with the library: one JSON file each."""

import copy
import functools
import json
from pathlib import Path

from keras_moe.models.variants import VARIANTS

# Inside the wheel the files lie in the package, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "presets", _PACKAGE.parent / "presets")


def builtin_presets() -> dict[str, dict]:
    """Every built-in preset by name.

    Each is a dict with `description`, `source`, the class names `backbone` and
    `task`, and their arguments `config` (the variant's sizes included) and
    `task_config`. The caller may change what it gets.
    """
    return copy.deepcopy(_read_presets())


@functools.cache
def _read_presets():
    folder = next(folder for folder in _FOLDERS if folder.is_dir())
    presets = {}
    for path in sorted(folder.glob("*.json")):
        preset = json.loads(path.read_text())
        sizes = VARIANTS[preset["variant"]].config()
        preset["config"] = {**sizes, **preset["config"]}
        presets[path.stem] = preset
    return presets
