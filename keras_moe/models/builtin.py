"""The presets that ship with the library: one JSON file each.

Beside the file of a trained one lies a folder of its name, as `save_to_preset` writes
it; `tools/make_trained_presets.py` makes both from a recipe.
"""

import copy
import functools
import json

from keras_moe.files import shipped_files
from keras_moe.models.registry import register_presets
from keras_moe.models.variants import VARIANTS


def builtin_presets() -> dict[str, dict]:
    """Every built-in preset by name."""
    return copy.deepcopy(_read_presets())


@functools.cache
def _read_presets():
    presets = {}
    for name, path in shipped_files("presets").items():
        preset = json.loads(path.read_text(encoding="utf-8"))
        config = _with_sizes(preset["config"], preset["variant"])
        presets[name] = {**preset, "config": config}
        if "weights" in preset:
            # Whether or not it is there: a trained preset is never silently random.
            presets[name]["weights"] = str(path.with_name(preset["weights"]))
    return presets


def _with_sizes(config, variant):
    """The config with the sizes of a variant, or of one for each tower."""
    if isinstance(variant, dict):
        towers = {name: _with_sizes(config[name], variant[name]) for name in variant}
        return {**config, **towers}
    return {**VARIANTS[variant].config(), **config}


def register_builtin_presets() -> None:
    """Makes the built-in presets known by name."""
    register_presets(_read_presets())
