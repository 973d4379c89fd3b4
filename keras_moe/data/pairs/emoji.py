"""Emoji with their names."""

from typing import Any

from keras_moe.data.emoji import load_emoji
from keras_moe.data.pairs import arrays
from keras_moe.data.pairs.source import PairSource


def read_pairs(split: str, options: Any) -> PairSource:
    """The pairs of a split, drawn at the size of the images or at their own.

    Emoji that are drawn alike are one image with several captions.

    Args:
        split: split of `load_emoji`.
        options: `SourceOptions`.
    """
    shape = options.image_shape
    if options.size is not None:
        shape = (options.size, options.size, shape[-1])
    emoji = load_emoji(split, shape, style=options.style, language=options.language)
    rows, captions = [], {}
    for row, (image, caption) in enumerate(zip(emoji.images, emoji.captions)):
        alike = captions.setdefault(image.tobytes(), [])
        if not alike:
            rows.append(row)
        alike.append(caption)
    return arrays.read_pairs(emoji.images[rows], list(captions.values()), "emoji")
