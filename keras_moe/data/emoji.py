"""Emoji with their names: real image-text pairs without a download."""

from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import check_image_shape, check_one_of, unfit
from keras_moe.data._captions import CaptionOptions, captioned_arrays
from keras_moe.data._emoji_names import (
    LANGUAGES,
    all_emoji,
    captions,
    code_of,
    split_of,
    subgroups,
)
from keras_moe.data._emoji_pictures import pictures
from keras_moe.data._examples import Classes, IndexedExamples, in_memory
from keras_moe.data._files import SPLITS

_OPENMOJI = (
    "OpenMoji, the open-source emoji and icon project (openmoji.org), CC BY-SA 4.0"
)
EMOJI_CREDIT = f"Emoji: {_OPENMOJI}"
# Side of labelled pictures: resizing them bilinearly to 32 pixels averages four pixels.
_SIDE = 64
_OPTIONS = ("language", "size")


class EmojiPairs(NamedTuple):
    """Pictures of emoji with captions, in Unicode's order.

    Attributes:
        images: (N, height, width, 3), uint8, on white.
        captions: unique names in the chosen language.
        codes: code points, such as `"1F469-1F3FF-200D-1F692"`.
        subgroups: Unicode's subgroups, such as `"person-role"`.
        groups: Unicode's groups, such as `"People & Body"`.
        bases: code points of the emoji without modifiers.
        modifiers: English names of the modifiers, such as `("dark skin tone",)`.
    """

    images: np.ndarray
    captions: tuple[str, ...]
    codes: tuple[str, ...]
    subgroups: tuple[str, ...]
    groups: tuple[str, ...]
    bases: tuple[str, ...]
    modifiers: tuple[tuple[str, ...], ...]


def load_emoji(
    split: str,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    language: str = "en",
    seed: int = 0,
) -> EmojiPairs:
    """Loads pictures of emoji and their names.

    An emoji is a base, such as a firefighter, with modifiers: gender, hair, direction,
    skin tones. A tenth of the concepts (emoji regardless of skin tone) is in
    `"validation"`, a tenth in `"test"`, the same in every language.

    Of emoji drawn alike (within 4 of 255 on average), only the one with the fewest
    modifiers is kept, so that no picture is in two splits. Pictures are cached below
    `KERAS_HOME` or `~/.keras`.

    OpenMoji's pictures are under CC BY-SA 4.0: show `EMOJI_CREDIT` with them.

    Args:
        split: `"train"`, `"validation"`, `"test"` or `"all"`.
        image_shape: (height, width, 3).
        language: one of ar, de, en, es, fa, fr, id, it, ja, ko, pt, ru, tr and zh.
        seed: seed of the splits; use the same one for all of them.

    Example:

    ```python
    train, test = load_emoji("train"), load_emoji("test")
    print(test.captions[0], test.images.shape)
    ```
    """
    check_one_of("split", split, SPLITS)
    check_one_of("language", language, LANGUAGES)
    shape = check_image_shape(image_shape)
    if shape[-1] != 3:
        raise unfit("3 channels for emoji", image_shape=shape)
    names = captions(language)
    # Of emoji drawn alike the first is kept.
    by_modifiers = sorted(all_emoji(), key=lambda one: len(one.parts.modifiers))
    drawn = pictures([one.text for one in by_modifiers], shape)
    rows = {by_modifiers[i].text: row for row, i in enumerate(drawn["indices"])}
    chosen = [
        one
        for one in all_emoji()
        if one.text in rows
        and one.text in names
        and split in ("all", split_of(one.parts, seed))
    ]
    return EmojiPairs(
        drawn["images"][[rows[one.text] for one in chosen]],
        tuple(names[one.text] for one in chosen),
        tuple(code_of(one.text) for one in chosen),
        tuple(one.subgroup for one in chosen),
        tuple(one.group for one in chosen),
        tuple(code_of(one.parts.base) for one in chosen),
        tuple(one.parts.modifiers for one in chosen),
    )


def find_classes(name: str, data_dir: str | None = None) -> Classes:
    """Returns the subgroups as classes, in Unicode's order."""
    return Classes(len(subgroups()), tuple(subgroups()))


def open_labelled(name: str, split: str, data_dir: str | None) -> IndexedExamples:
    """Opens a split of emoji labelled by subgroup."""
    side = _source_options(name).get("size", _SIDE)
    pairs = load_emoji(split, (side, side, 3))
    classes = find_classes(name)
    number = {subgroup: index for index, subgroup in enumerate(subgroups())}
    labels = np.asarray([number[subgroup] for subgroup in pairs.subgroups], "int32")
    return in_memory(pairs.images, labels, classes)


def credit(name: str) -> str:
    return _OPENMOJI


def open_captioned(name: str, split: str, options: CaptionOptions) -> IndexedExamples:
    """Opens a split of emoji with names, drawn at the size of the batches."""
    own = _source_options(name)
    size = own.pop("size", None)
    height, width, _ = options.image_shape
    pairs = load_emoji(split, (size or height, size or width, 3), **own)
    return captioned_arrays(pairs.images, pairs.captions)


def _source_options(name: str) -> dict[str, Any]:
    """Parses the options in a source's name, such as "language=de,size=72"."""
    options: dict[str, Any] = {}
    for part in filter(None, name.split(",")):
        key, _, value = part.rpartition("=")
        key = check_one_of("an option of emoji", key or part, _OPTIONS)
        options[key] = int(value) if key == "size" else value
    return options
