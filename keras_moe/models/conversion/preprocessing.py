"""How a publisher's images are prepared, as arguments of `ImagePreprocessor`.

Mean and standard deviation are not among them where they have become part of the patch
embedding: such models take [-1, 1].
"""

import re
from typing import Any

import numpy as np

# Names and Pillow's numbers of interpolations -> this library's names.
_INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", 2: "bilinear"}
_INTERPOLATIONS[3] = "bicubic"
# timm's defaults.
_TIMM_CROP = 0.875
_NO_NAME = re.compile(r"LABEL_\d+")


def _interpolation(value):
    """Arguments of the interpolation, antialiased as Pillow's, and notes."""
    interpolation = _INTERPOLATIONS.get(value, "bicubic")
    notes = ()
    if value not in _INTERPOLATIONS:
        notes = (f"preprocessor: bicubic in the place of interpolation={value!r}",)
    return {"interpolation": interpolation, "antialias": True}, notes


def class_names(config: dict, num_classes: int | None) -> list[str] | None:
    """The names of a head's classes, if a config has them for all.

    Args:
        config: config of timm (`label_names`) or transformers (`id2label`).
        num_classes: number of the head's classes; None without a head.
    """
    names = config.get("label_names")
    names = names or config.get("pretrained_cfg", {}).get("label_names")
    by_number = config.get("id2label")
    if not names and by_number:
        names = [by_number.get(str(i)) for i in range(len(by_number))]
    if not names or len(names) != num_classes or None in names:
        return None
    # The placeholders that transformers has for classes without names.
    return None if all(map(_NO_NAME.fullmatch, names)) else list(names)


def timm_preprocessing(config: dict) -> tuple[dict, tuple[str, ...]]:
    """Arguments that follow from timm's `pretrained_cfg`, and notes."""
    cfg = config.get("pretrained_cfg", {})
    arguments, notes = _interpolation(cfg.get("interpolation") or "bicubic")
    squashes = cfg.get("crop_mode") == "squash"
    crop = float(cfg.get("crop_pct") or _TIMM_CROP)
    # A share above 1 pads: nothing of the image is cut off.
    return {**arguments, "center_crop": None if squashes else min(crop, 1.0)}, notes


def transformers_preprocessing(
    preprocessor: dict, is_clip: bool
) -> tuple[dict, tuple[str, ...]]:
    """Arguments that follow from transformers' `preprocessor_config.json`, and
    notes.
    """
    arguments, notes = _interpolation(preprocessor.get("resample", 3))
    size, crop = (_edge(preprocessor.get(x)) for x in ("size", "crop_size"))
    squashes = isinstance(preprocessor.get("size"), dict) and (
        "height" in preprocessor["size"]
    )
    if not preprocessor.get("size"):
        squashes = not is_clip
    share = None if squashes else 1.0
    if share and size and crop and preprocessor.get("do_center_crop", is_clip):
        share = min(crop / size, 1.0)
    return {**arguments, "center_crop": share}, notes


def _edge(size):
    """The shorter edge in one of transformers' forms of a size."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size if type(size) is int and size > 0 else None


def openclip_preprocessing(cfg: dict) -> tuple[dict, tuple[str, ...]]:
    """Arguments that follow from OpenCLIP's `preprocess_cfg`, and notes."""
    arguments, notes = _interpolation(cfg.get("interpolation") or "bicubic")
    mode = cfg.get("resize_mode") or "shortest"
    if mode == "longest":
        notes += ("preprocessor: the middle of the image, which the source pads",)
    share = None if mode == "squash" else 1.0
    return {**arguments, "center_crop": share}, notes


def keras_hub_preprocessing(
    preprocessor: Any, channels: int
) -> tuple[dict | None, tuple[str, ...]]:
    """Arguments that follow from a KerasHub task's preprocessor, or None; and notes."""
    if preprocessor is None:
        return None, ()
    converter = getattr(preprocessor, "image_converter", None)
    lost = "the task's preprocessor is not carried over: the model takes the images "
    lost = (f"{lost}that it made",)
    if converter is None or converter.scale is None:
        return None, lost
    # Pixels x in [0, 1] become 255 x scale + offset.
    std = 1.0 / (255.0 * np.asarray(converter.scale, "float64"))
    mean = -std * np.asarray(0.0 if converter.offset is None else converter.offset)
    if not (np.isfinite(std).all() and np.all(std > 0)) or std.size not in (
        1,
        channels,
    ):
        return None, lost
    arguments, notes = _interpolation(converter.interpolation)
    if arguments["interpolation"] == "bilinear":
        arguments["antialias"] = bool(converter.antialias)
    if getattr(converter, "pad_to_aspect_ratio", False):
        notes += ("preprocessor: the middle of the image, which the source pads",)
    crops = converter.crop_to_aspect_ratio or converter.pad_to_aspect_ratio
    arguments.update(
        mean=mean.ravel().tolist(),
        std=std.ravel().tolist(),
        center_crop=1.0 if crops else None,
    )
    applied = "the task's preprocessor has become model.preprocessor, which classify "
    return arguments, (*notes, f"{applied}applies, and fit and predict do not")
