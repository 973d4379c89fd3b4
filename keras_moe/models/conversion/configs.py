"""Publishers' descriptions of their weights in JSON, and checks of their types."""

import json
import math
import os
from pathlib import Path
from typing import Any


def read_object(path: str | os.PathLike) -> dict:
    """The content of a JSON file that holds an object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(
            f"Expected whole JSON in {path}; received: {error}. "
            "The file is truncated or of another kind."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"Expected a JSON object in {path}; received: {type(content).__name__}"
        )
    return content


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 0 (and no bool)."""
    return type(value) is int and value >= 0


def _is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def _numbers(test):
    return lambda value: isinstance(value, list) and value and all(map(test, value))


_TEXT = "a string", lambda value: isinstance(value, str)
_BOOL = "true or false", lambda value: isinstance(value, bool)
_COUNT = "an integer of at least 0", is_count
_SIZE = "an integer of at least 1", lambda value: is_count(value) and value > 0
_EPSILON = "a number above 0", lambda value: _is_number(value) and value > 0
_SIZES = (
    "an integer of at least 1, or a list of such",
    lambda value: _SIZE[1](value) or _numbers(_SIZE[1])(value),
)
_MEAN = "a list of numbers", _numbers(_is_number)
_OPTIONAL_TEXT = "a string", lambda value: value is None or isinstance(value, str)
_OPTIONAL_SHARE = (
    "a number above 0",
    lambda value: value is None or _EPSILON[1](value),
)
_OPTIONAL_NAMES = (
    "a list of strings",
    lambda value: value is None or _numbers(_TEXT[1])(value),
)
_OPTIONAL_LABELS = (
    "an object of strings",
    lambda value: (
        value is None
        or (isinstance(value, dict) and all(map(_TEXT[1], value.values())))
    ),
)
_STD = "a list of numbers above 0", _numbers(_EPSILON[1])

_TIMM = {
    "num_classes": _COUNT,
    "global_pool": _TEXT,
    "act_layer": _TEXT,
    "embed_dim": _SIZE,
    "depth": _SIZE,
    "num_blocks": _SIZE,
    "num_heads": _SIZE,
    "img_size": _SIZES,
    "qk_norm": _BOOL,
}
_OPTIONAL_COUNT = (
    "an integer of at least 0",
    lambda value: value is None or is_count(value),
)
_TOWER = {
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    "hidden_act": _TEXT,
    "layer_norm_eps": _EPSILON,
}
_TEXT_TOWER = {
    **_TOWER,
    "vocab_size": _SIZE,
    "max_position_embeddings": _SIZE,
    "eos_token_id": _OPTIONAL_COUNT,
}
_OPENCLIP_TEXT = {
    "width": _SIZE,
    "heads": _SIZE,
    "layers": _SIZE,
    "vocab_size": _SIZE,
    "context_length": _SIZE,
    "no_causal_mask": _BOOL,
    "pool_type": _TEXT,
    "eos_id": _COUNT,
}
# The entries of a config that are read; a dict stands for an object of such entries.
CONFIG = {
    **_TIMM,
    **_TEXT_TOWER,
    "architecture": _TEXT,
    "num_features": _SIZE,
    "model_args": _TIMM,
    "label_names": _OPTIONAL_NAMES,
    "id2label": _OPTIONAL_LABELS,
    "pretrained_cfg": {
        "input_size": _SIZES,
        "mean": _MEAN,
        "std": _STD,
        "interpolation": _OPTIONAL_TEXT,
        "crop_pct": _OPTIONAL_SHARE,
        "crop_mode": _OPTIONAL_TEXT,
        "label_names": _OPTIONAL_NAMES,
    },
    "vision_config": _TOWER,
    "text_config": _TEXT_TOWER,
    "model_cfg": {
        "embed_dim": _SIZE,
        "quick_gelu": _BOOL,
        "vision_cfg": {"width": _SIZE, "head_width": _SIZE},
        "text_cfg": _OPENCLIP_TEXT,
    },
    "preprocess_cfg": {
        "mean": _MEAN,
        "std": _STD,
        "interpolation": _OPTIONAL_TEXT,
        "resize_mode": _OPTIONAL_TEXT,
    },
}
PREPROCESSOR = {
    "image_mean": _MEAN,
    "image_std": _STD,
    "do_normalize": _BOOL,
    "do_rescale": _BOOL,
    "rescale_factor": _EPSILON,
    "do_center_crop": _BOOL,
    "resample": _COUNT,
}


def check_types(content: dict, types: dict, path: str, place: str = "") -> dict:
    """`content`, if the entries that are read have the right types."""
    for name, expected in types.items():
        if name not in content:
            continue
        value, where = content[name], f"{place}{name}"
        if isinstance(expected, dict):
            if not isinstance(value, dict):
                raise ValueError(
                    f"Expected an object as {where!r} in {path}; received: {value!r}"
                )
            check_types(value, expected, path, f"{where}.")
        elif not expected[1](value):
            raise ValueError(
                f"Expected {expected[0]} as {where!r} in {path}; received: {value!r}"
            )
    return content
