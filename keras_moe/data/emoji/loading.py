"""Emoji with their names: real pairs of images and text without a download."""

from typing import NamedTuple

import numpy as np

from keras_moe.checks import check_image_shape, check_one_of
from keras_moe.data.emoji.cache import pictures
from keras_moe.data.emoji.fonts import STYLES
from keras_moe.data.emoji.names import LANGUAGES, all_emoji, captions, subgroups
from keras_moe.data.emoji.parts import code_of
from keras_moe.data.emoji.splits import SPLITS, split_of
from keras_moe.data.examples import IndexedExamples, in_memory
from keras_moe.data.labels import Classes

EMOJI_CREDIT = (
    "Emoji: OpenMoji, the open-source emoji and icon project (openmoji.org), "
    "CC BY-SA 4.0"
)
# The size of the images in a pipeline, which resizes them: its bilinear resizing to
# 32 pixels is then a mean of four.
_NATIVE_SHAPE = (64, 64, 3)


class EmojiPairs(NamedTuple):
    """Pictures of emoji with their captions, in Unicode's order.

    Fields:
        images: (N, height, width, 3), uint8, on white.
        captions: names in the chosen language, each of one emoji, such as `"woman
            firefighter: dark skin tone"`.
        codes: code points, such as `"1F469-1F3FF-200D-1F692"`.
        subgroups: Unicode's subgroups, such as `"person-role"`.
        groups: Unicode's groups, such as `"People & Body"`.
        bases: code points of the emoji without modifiers.
        modifiers: English names of the modifiers, such as `("woman", "dark skin
            tone")`.
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
    style: str = "openmoji",
    language: str = "en",
    seed: int = 0,
) -> EmojiPairs:
    """Loads emoji and their names as pairs of images and captions.

    An emoji is a base, such as a firefighter, and modifiers: gender, hair, direction,
    skin tones. Splits are made by concept, which is an emoji whatever its skin tones:
    a tenth of the concepts is in `"validation"`, a tenth in `"test"`, the others are in
    `"train"`. A woman firefighter may be in `"test"` with all her skin tones while a
    man firefighter is in `"train"`, and so may an avocado, of which `"train"` has
    nothing. Splits are the same in every language and style.

    Of emoji that a style draws alike, within 4 of 255 on average, the one with fewest
    modifiers stays: no picture is in two splits, and no caption names what its picture
    does not show. Pictures are rendered when a size is first asked for, and are kept
    below `KERAS_HOME`, or `~/.keras`.

    OpenMoji's pictures are under CC BY-SA 4.0: `EMOJI_CREDIT` belongs under every
    picture that shows them. Noto's are a second style of the same emoji, to evaluate
    models that were not trained on it.

    Args:
        split: `"train"`, `"validation"`, `"test"` or `"all"`.
        image_shape: (height, width, 3).
        style: `"openmoji"`, or `"noto"`, whose font is the Debian package
            `fonts-noto-color-emoji`; it lacks the newest emoji.
        language: one of ar, de, en, es, fa, fr, id, it, ja, ko, pt, ru, tr and zh.
        seed: seed of the splits; one seed keeps them disjoint.

    Returns:
        Images (N, height, width, 3), uint8 in [0, 255], and N entries of each other
        field of `EmojiPairs`.

    Raises:
        ValueError: if an argument is out of range.
        ImportError: if the packages of `keras-moe[emoji]` are not installed.
        FileNotFoundError: if Noto's font is not installed.

    Example:

    ```python
    train, test = load_emoji("train"), load_emoji("test")
    print(test.captions[0], test.images.shape)
    ```
    """
    check_one_of("split", split, SPLITS)
    check_one_of("style", style, STYLES)
    check_one_of("language", language, LANGUAGES)
    check_image_shape(image_shape)
    if image_shape[-1] != 3:
        raise ValueError(
            f"Expected 3 channels for emoji; received: image_shape={tuple(image_shape)}"
        )
    names = captions(language)
    # Of emoji that are drawn alike the first stays.
    by_modifiers = sorted(all_emoji(), key=lambda one: len(one.parts.modifiers))
    drawn = pictures(style, [one.text for one in by_modifiers], tuple(image_shape))
    rows = {by_modifiers[p].text: row for row, p in enumerate(drawn.places.tolist())}
    chosen = [
        one
        for one in all_emoji()
        if one.text in rows
        and one.text in names
        and split in ("all", split_of(one.parts, seed))
    ]
    return EmojiPairs(
        drawn.images[[rows[one.text] for one in chosen]],
        tuple(names[one.text] for one in chosen),
        tuple(code_of(one.text) for one in chosen),
        tuple(one.subgroup for one in chosen),
        tuple(one.group for one in chosen),
        tuple(code_of(one.parts.base) for one in chosen),
        tuple(one.parts.modifiers for one in chosen),
    )


def class_names() -> tuple[str, ...]:
    """The subgroups, which are the classes, in Unicode's order."""
    return tuple(subgroups())


def read_examples(split: str, style: str) -> IndexedExamples:
    """The examples of a split for a pipeline, labelled by their subgroups."""
    pairs = load_emoji(split, _NATIVE_SHAPE, style)
    number = {name: index for index, name in enumerate(class_names())}
    labels = np.asarray([number[name] for name in pairs.subgroups], "int32")
    return in_memory(pairs.images, labels, Classes(len(number), class_names()))
