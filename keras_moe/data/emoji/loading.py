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
        drawings: (N,), int64, numbers that are equal for emoji that are drawn alike.
    """

    images: np.ndarray
    captions: tuple[str, ...]
    codes: tuple[str, ...]
    subgroups: tuple[str, ...]
    groups: tuple[str, ...]
    bases: tuple[str, ...]
    modifiers: tuple[tuple[str, ...], ...]
    drawings: np.ndarray


def load_emoji(
    split: str,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    style: str = "openmoji",
    language: str = "en",
    seed: int = 0,
) -> EmojiPairs:
    """Loads emoji and their names as pairs of images and captions.

    An emoji is a base, such as a firefighter, and modifiers: gender, hair, direction,
    skin tones. `"test"` holds out combinations: each base and each modifier in it is in
    `"train"`, too, the whole is not. `"held_out_bases"` has bases of which `"train"`
    has no combination. Splits are the same in every language, and in every style but
    for the emoji that it lacks, and for those of `"train"` that it draws alike.

    OpenMoji 17 has 3,944 emoji in 98 subgroups: with seed 0, 3,275 in `"train"`, 422
    in `"test"` and 185 in `"held_out_bases"`. The other 62 are in `"all"` alone: they
    are drawn like one that is held out, such as a bald man and a bald person. Emoji
    within a split may be drawn alike, too. Pictures are rendered when a size is first
    asked for, and are kept below `KERAS_HOME`, or `~/.keras`.

    OpenMoji's pictures are under CC BY-SA 4.0: `EMOJI_CREDIT` belongs under every
    picture that shows them. Noto's are a second style of the same emoji, to evaluate
    models that were not trained on it.

    Args:
        split: `"train"`, `"test"`, `"held_out_bases"` or `"all"`.
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
    emoji = all_emoji()
    names, splits = captions(language), split_of(emoji, seed)
    drawn = pictures(style, [one.text for one in emoji], tuple(image_shape))
    shown = [emoji[place] for place in drawn.places.tolist()]
    of_split = [splits[one.text] for one in shown]
    if split == "train":
        # A picture that is held out is not trained on under another name.
        held_out = {
            drawing
            for drawing, own in zip(drawn.drawings.tolist(), of_split)
            if own != "train"
        }
        of_split = [
            None if drawing in held_out else own
            for drawing, own in zip(drawn.drawings.tolist(), of_split)
        ]
    rows = [
        row
        for row, (one, own) in enumerate(zip(shown, of_split))
        if split in ("all", own) and one.text in names
    ]
    chosen = [shown[row] for row in rows]
    return EmojiPairs(
        drawn.images[rows],
        tuple(names[one.text] for one in chosen),
        tuple(code_of(one.text) for one in chosen),
        tuple(one.subgroup for one in chosen),
        tuple(one.group for one in chosen),
        tuple(code_of(one.parts.base) for one in chosen),
        tuple(one.parts.modifiers for one in chosen),
        drawn.drawings[rows],
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
