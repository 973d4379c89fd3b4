"""Emoji with their names."""

from typing import Any

from keras_moe.data.emoji import load_emoji
from keras_moe.data.pairs import arrays
from keras_moe.data.pairs.source import PairSource


def read_pairs(source: str, split: str, options: Any) -> PairSource:
    """The pairs of a split, drawn at the size of the images or at their own."""
    own = source.partition(":")[2] or None
    if None not in (own, options.style) and own != options.style:
        raise ValueError(
            f"Expected the style of {source!r}; received: style={options.style!r}"
        )
    height, width, _ = options.image_shape
    emoji = load_emoji(
        split,
        (options.size or height, options.size or width, 3),
        style=own or options.style or "openmoji",
        language=options.language or "en",
    )
    return arrays.read_pairs(emoji.images, emoji.captions, source)
