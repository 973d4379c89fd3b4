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


def builtin_task_config(spec: dict, overrides: dict) -> dict:
    """A built-in preset's arguments of the task that fit what is overridden.

    A representation layer as wide as the backbone follows its width. It and the bias of
    V-MoE's dense head are left out where a final muMoE takes this head's place.

    Args:
        spec: of `builtin_presets`.
        overrides: arguments of backbone and task.
    """
    task_config = dict(spec["task_config"])
    hidden_dim = spec["config"]["hidden_dim"]
    if task_config.get("representation_dim") == hidden_dim:
        task_config["representation_dim"] = overrides.get("hidden_dim", hidden_dim)
    if overrides.get("head") and overrides.get("head_position", "final") == "final":
        # Its experts have biases of their own.
        task_config.pop("head_bias", None)
        task_config.pop("representation_dim", None)
    return task_config


@functools.cache
def _read_presets():
    presets = {}
    for name, path in shipped_files("presets").items():
        preset = json.loads(path.read_text())
        sizes = VARIANTS[preset["variant"]].config()
        preset["config"] = {**sizes, **preset["config"]}
        presets[name] = preset
    return presets
