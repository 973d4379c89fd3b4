"""Splits of the emoji by concept: an emoji, whatever its skin tones.

Each concept has a draw that follows from the seed and its own code points, so that
splits are the same in every language and style, and stay when emoji are added.
"""

import hashlib

from keras_moe.data.emoji.parts import SKIN_TONES, Parts, code_of

SPLITS = ("train", "validation", "test", "all")
# The share of concepts in each of the validation and the test split.
HELD_OUT_FRACTION = 0.1


def split_of(parts: Parts, seed: int) -> str:
    """The split of an emoji, which is that of its concept."""
    tones = SKIN_TONES.values()
    concept = [code_of(parts.base), *(x for x in parts.modifiers if x not in tones)]
    digest = hashlib.sha256(f"{seed} {' '.join(concept)}".encode()).digest()
    draw = int.from_bytes(digest[:6], "big") / 2**48
    if draw < HELD_OUT_FRACTION:
        return "test"
    return "validation" if draw < 2 * HELD_OUT_FRACTION else "train"
