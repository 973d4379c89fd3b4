"""Emoji with their names."""

import importlib
from typing import Any

from keras_moe.data.pairs import arrays
from keras_moe.data.pairs.source import PairSource

_RENDERER = "keras_moe.data.emoji"


def read_pairs(split: str, options: Any) -> PairSource:
    """The pairs of a split, drawn at the size of the images or at their own.

    Args:
        split: split of `load_emoji`.
        options: `SourceOptions`.
    """
    load_emoji = importlib.import_module(_RENDERER).load_emoji
    shape = options.image_shape
    if options.size is not None:
        shape = (options.size, options.size, shape[-1])
    emoji = load_emoji(split, shape, style=options.style, language=options.language)
    return arrays.read_pairs(emoji.images, emoji.captions, "emoji")
