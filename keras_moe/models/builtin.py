"""The presets that ship with the library: one JSON file each."""

import copy
import functools
import json

from keras_moe.files import shipped_files
from keras_moe.models.variants import VARIANTS


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
