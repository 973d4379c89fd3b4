"""Reads publishers' JSON configs and their image preprocessing."""

import json
import math
import os
import re
from typing import Any

from keras_moe._files import read_text
from keras_moe.models.conversion._rules import Normalization


def read_object(path: str | os.PathLike) -> dict:
    """Reads a JSON file that holds an object."""
    try:
        return dict(json.loads(read_text(path)))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a whole JSON object in {path}; received: {error}. "
            "The file is truncated or has another format."
        ) from error


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
_INTERPOLATIONS = dict.fromkeys(("bilinear", 2), "bilinear")
_INTERPOLATIONS.update(dict.fromkeys(("bicubic", 3), "bicubic"))
# transformers' placeholder names.
_NO_NAME = re.compile(r"LABEL_\d+")


def normalization(
    channels: int, preprocessor: dict, default: Normalization | None = None
) -> Normalization | None:
    """Returns the normalisation in a preprocessor's config; None for [-1, 1]."""
    applied = default or Normalization((0.5,) * channels, (0.5,) * channels)
    mean, std = preprocessor.get("image_mean"), preprocessor.get("image_std")
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
    known = _INTERPOLATIONS.get(value, "bicubic")
    notes = ()
    if value not in _INTERPOLATIONS:
        notes = (f"preprocessor: bicubic instead of interpolation={value!r}",)
    return {"interpolation": known, "antialias": True}, notes


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
