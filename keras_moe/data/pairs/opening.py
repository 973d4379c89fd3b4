"""The sources of pairs by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_moe.data.emoji.fonts import STYLES
from keras_moe.data.openclipart import read_clip_art
from keras_moe.data.pairs import (
    arrays,
    emoji,
    folder,
    templates,
    tfds,
    tfrecord,
    webdataset,
)
from keras_moe.data.pairs.source import PairSource

EMOJI_OPTIONS = ("style", "language", "size")


class SourceOptions(NamedTuple):
    """The options that decide what a source has, apart from its order."""

    image_shape: tuple[int, int, int] = (32, 32, 3)
    every_caption: bool = False
    templates: Any = None
    style: str | None = None
    language: str | None = None
    size: int | None = None
    data_dir: str | None = None


def open_all(source: Any, split: str, options: SourceOptions) -> list[PairSource]:
    """The pairs of a split of a source of `load_pairs`, or of each in a mixture."""
    sources = list(source) if isinstance(source, Mapping) else [source]
    opened = [_open(one, split, options) for one in sources]
    if options.templates is not None and not any(x.has_classes for x in opened):
        raise ValueError(
            "Expected templates with a source of classes alone; received: "
            f"templates={options.templates!r} for {[pairs.name for pairs in opened]}"
        )
    of_emoji = {name: getattr(options, name) for name in EMOJI_OPTIONS}
    own = {name: value for name, value in of_emoji.items() if value is not None}
    if own and not any(is_emoji(one) for one in sources):
        raise ValueError(
            f"Expected {', '.join(own)} with emoji alone; received: {own} for "
            f"{[pairs.name for pairs in opened]}"
        )
    return opened


def is_emoji(source: Any) -> bool:
    """Whether a source has pictures of emoji, to which `EMOJI_OPTIONS` belong."""
    return isinstance(source, str) and source in (
        "emoji",
        *(f"emoji:{style}" for style in STYLES),
    )


def _open(source, split, options):
    every, data_dir = options.every_caption, options.data_dir
    if isinstance(source, tuple) and len(source) == 2:
        return arrays.read_pairs(*source)
    if is_emoji(source):
        return emoji.read_pairs(source, split, options)
    kind, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind == "webdataset" and name:
        return webdataset.read_pairs(name, split)
    if kind == "openclipart" and name and options.templates is None:
        clip_art = read_clip_art(name, split)
        return arrays.read_pairs(clip_art.images, clip_art.captions.tolist(), source)
    if kind == "folder":
        folder.check_split(name, split)
    if kind == "folder" and folder.has_captions(name, split):
        return folder.read_pairs(name, split)
    if kind == "tfrecord" and name and tfrecord.has_captions(name):
        return tfrecord.read_pairs(name, split, every)
    if kind == "tfds" and name and tfds.has_captions(name, data_dir):
        return tfds.read_pairs(name, split, every, data_dir)
    if not isinstance(source, str):
        raise ValueError(
            "Expected the name of a source, a dict of names and weights, or a tuple of "
            f"images and captions; received: {type(source).__name__}"
        )
    return templates.read_pairs(source, split, options.templates, every, data_dir)
