"""Splits of the emoji that hold out combinations, and bases, that training never sees.

Each emoji has a draw that follows from the seed and its own code points, so that
splits are the same in every language and style, and stay when emoji are added.
"""

import hashlib
from collections.abc import Sequence

from keras_moe.data.emoji.names import Emoji
from keras_moe.data.emoji.parts import code_of

SPLITS = ("train", "test", "held_out_bases", "all")
BASE_FRACTION = 0.05
COMBINATION_FRACTION = 0.2


def split_of(emoji: Sequence[Emoji], seed: int) -> dict[str, str]:
    """The split of each emoji, by its text.

    A base that is held out is so in all of its combinations. Other emoji with
    modifiers are held out one by one, while their bases and each of their modifiers
    stay in training, in other combinations.

    Args:
        emoji: emoji of the whole set.
        seed: seed of the draws.

    Returns:
        `"train"`, `"test"` or `"held_out_bases"` by text.
    """
    splits, draws = {}, {}
    for one in emoji:
        draws[one.text] = _draw(seed, "combination", one.text)
        if _draw(seed, "base", one.parts.base) < BASE_FRACTION:
            splits[one.text] = "held_out_bases"
        elif one.parts.modifiers and draws[one.text] < COMBINATION_FRACTION:
            splits[one.text] = "test"
        else:
            splits[one.text] = "train"
    trained = set().union(*(_pieces(x) for x in emoji if splits[x.text] == "train"))
    # The part that no other emoji shows is learned from the one with the last draw.
    for one in sorted(emoji, key=lambda x: draws[x.text], reverse=True):
        if splits[one.text] == "test" and not _pieces(one) <= trained:
            splits[one.text] = "train"
            trained |= _pieces(one)
    return splits


def _pieces(emoji: Emoji) -> set[tuple[str, str]]:
    """The base and the modifiers, told apart."""
    modifiers = {("modifier", modifier) for modifier in emoji.parts.modifiers}
    return {("base", emoji.parts.base), *modifiers}


def _draw(seed: int, purpose: str, text: str) -> float:
    """A number in [0, 1) that follows from its arguments alone."""
    digest = hashlib.sha256(f"{seed} {purpose} {code_of(text)}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
