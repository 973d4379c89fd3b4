"""Reads publishers' JSON configs and their image preprocessing."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from keras_moe.models.conversion._rules import Normalization


def read_object(path: str | os.PathLike) -> dict:
    """Reads a JSON file that holds an object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(
            f"Expected whole JSON in {path}; received: {error}. "
            "The file is truncated or has another format."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"Expected a JSON object in {path}; received: {type(content).__name__}"
        )
    return content


# Types of entries: expected type for the error, and a test. A dict stands for an object
# with such entries.


def _is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def _list_of(kind):
    return lambda value: isinstance(value, list) and value and all(map(kind[1], value))


def optional(kind: tuple) -> tuple:
    """The same type, or null."""
    return kind[0], lambda value: value is None or kind[1](value)


TEXT = "a string", lambda value: isinstance(value, str)
BOOL = "true or false", lambda value: isinstance(value, bool)
COUNT = "an integer of at least 0", lambda value: type(value) is int and value >= 0
SIZE = "an integer of at least 1", lambda value: type(value) is int and value >= 1
EPSILON = "a number above 0", lambda value: _is_number(value) and value > 0
SIZES = (
    "an integer of at least 1, or a list of such",
    lambda value: SIZE[1](value) or _list_of(SIZE)(value),
)
MEAN = "a list of numbers", _list_of(("a number", _is_number))
STD = "a list of numbers above 0", _list_of(EPSILON)
NAMES = optional(("a list of strings", _list_of(TEXT)))
LABELS = optional(
    (
        "an object of strings",
        lambda value: isinstance(value, dict) and all(map(TEXT[1], value.values())),
    )
)


def check_types(content: dict, types: dict, path: str, prefix: str = "") -> dict:
    """Raises ValueError for entries of the wrong type; ignores unknown ones."""
    for name, expected in types.items():
        if name not in content:
            continue
        value, where = content[name], f"{prefix}{name}"
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


def agree(file, config: dict, name: str, **sizes) -> None:
    """Raises ValueError if the weights' sizes differ from the config's."""
    for argument, size in sizes.items():
        if config.get(argument, size) != size:
            raise ValueError(
                f"Expected tensors with {argument}={config[argument]!r} in "
                f"{file.path}, as {name} says; received: {size}"
            )


# Images

CLIP_IMAGES = Normalization(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
# Names and Pillow's codes of interpolations.
_INTERPOLATIONS = {
    "bilinear": "bilinear",
    2: "bilinear",
    "bicubic": "bicubic",
    3: "bicubic",
}
# transformers' placeholder names.
_NO_NAME = re.compile(r"LABEL_\d+")


def normalization(
    channels: int,
    mean: list | None,
    std: list | None,
    preprocessor: dict,
    default: Normalization | None = None,
) -> Normalization | None:
    """Returns the image normalisation, or None if it is the default [-1, 1]."""
    applied = default or Normalization((0.5,) * channels, (0.5,) * channels)
    if mean is not None and std is not None:
        applied = Normalization(tuple(mean), tuple(std))
    if not preprocessor.get("do_normalize", True):
        applied = Normalization((0.0,) * channels, (1.0,) * channels)
    if len(applied.mean) != channels or len(applied.std) != channels:
        raise ValueError(
            f"Expected mean and std of {channels} channels; received: "
            f"mean={list(applied.mean)}, std={list(applied.std)}"
        )
    # A white pixel before normalisation.
    white = 255 * preprocessor.get("rescale_factor", 1 / 255)
    if not preprocessor.get("do_rescale", True):
        white = 255
    if not math.isclose(white, 1, rel_tol=1e-6):
        applied = Normalization(*(tuple(x / white for x in part) for part in applied))
    return None if applied.is_default else applied


def interpolation(value: Any) -> tuple[dict, tuple[str, ...]]:
    """Returns arguments of `ImagePreprocessor`, antialiased as in Pillow, and notes."""
    known = _INTERPOLATIONS.get(value)
    notes = ()
    if known is None:
        notes = (f"preprocessor: bicubic instead of interpolation={value!r}",)
    return {"interpolation": known or "bicubic", "antialias": True}, notes


def class_names(config: dict, num_classes: int | None) -> list[str] | None:
    """Returns timm's or transformers' class names, if complete."""
    names = config.get("label_names")
    names = names or config.get("pretrained_cfg", {}).get("label_names")
    by_number = config.get("id2label")
    if not names and by_number:
        names = [by_number.get(str(i)) for i in range(len(by_number))]
    if not names or len(names) != num_classes or None in names:
        return None
    return None if all(map(_NO_NAME.fullmatch, names)) else list(names)
