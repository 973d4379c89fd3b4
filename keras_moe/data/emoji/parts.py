"""An emoji is a base and modifiers: `woman firefighter: dark skin tone` has two.

Unicode writes combinations as sequences of code points, in several ways. Taking them
apart needs no names, so that it is the same in every language and style.
"""

from typing import NamedTuple

JOINER, EMOJI_STYLE = "\u200d", "\ufe0f"
SKIN_TONES = {
    "\U0001f3fb": "light skin tone",
    "\U0001f3fc": "medium-light skin tone",
    "\U0001f3fd": "medium skin tone",
    "\U0001f3fe": "medium-dark skin tone",
    "\U0001f3ff": "dark skin tone",
}
HAIR = {
    "\U0001f9b0": "red hair",
    "\U0001f9b1": "curly hair",
    "\U0001f9b2": "bald",
    "\U0001f9b3": "white hair",
}
# Signs at the end of a sequence.
_SIGNS = {"\u2640": "woman", "\u2642": "man", "\u27a1": "facing right"}
_PERSON, _CHILD, _FAMILY = "\U0001f9d1", "\U0001f9d2", "\U0001f46a"
_GENDERS = {"\U0001f468": "man", "\U0001f469": "woman"}
_MEMBERS = {
    **_GENDERS,
    _PERSON: "adult",
    _CHILD: "child",
    "\U0001f466": "boy",
    "\U0001f467": "girl",
}
_HEART = "\u2764"
# The signs between two people, and the emoji without a gender.
_PAIRS = {
    ("\U0001f91d",): f"{_PERSON}{JOINER}\U0001f91d{JOINER}{_PERSON}",
    ("\U0001f430",): "\U0001f46f",
    ("\U0001faef",): "\U0001f93c",
    (_HEART,): "\U0001f491",
    (_HEART, "\U0001f48b"): "\U0001f48f",
}
_HANDS = _PAIRS["\U0001f91d",]
# Combinations that have a code point, or another sequence, of their own.
_ALIKE = {
    "\U0001f46b": (_HANDS, ("woman", "man")),
    "\U0001f46c": (_HANDS, ("man",)),
    "\U0001f46d": (_HANDS, ("woman",)),
    f"\U0001faf1{JOINER}\U0001faf2": ("\U0001f91d", ()),
}


class Parts(NamedTuple):
    """An emoji taken apart."""

    base: str
    modifiers: tuple[str, ...]


def parts_of(emoji: str) -> Parts:
    """The base and the modifiers of an emoji."""
    plain = emoji.replace(EMOJI_STYLE, "")
    tones = tuple(SKIN_TONES[sign] for sign in plain if sign in SKIN_TONES)
    plain = "".join(sign for sign in plain if sign not in SKIN_TONES)
    pieces = plain.split(JOINER)
    signs = []
    while len(pieces) > 1 and pieces[-1] in {**_SIGNS, **HAIR}:
        signs.insert(0, {**_SIGNS, **HAIR}[pieces.pop()])
    base, people = _people(pieces)
    return Parts(base, (*people, *signs, *tones))


def code_of(emoji: str) -> str:
    """The code points of an emoji, such as `"1F469-200D-1F692"`."""
    return "-".join(f"{ord(sign):04X}" for sign in emoji)


def _people(pieces: list[str]) -> tuple[str, tuple[str, ...]]:
    """The base of pieces without signs at their end, and the people's modifiers."""
    text = JOINER.join(pieces)
    if text in _ALIKE:
        return _ALIKE[text]
    if len(pieces) > 1 and all(piece in _MEMBERS for piece in pieces):
        return _FAMILY, tuple(_MEMBERS[piece] for piece in pieces)
    first, *between, last = pieces if len(pieces) > 2 else (text, "")
    if tuple(between) in _PAIRS:
        # Two women are women; people without a gender have no modifier.
        genders = dict.fromkeys(_GENDERS[x] for x in (first, last) if x in _GENDERS)
        return _PAIRS[tuple(between)], tuple(genders)
    if pieces[0] in _GENDERS:
        return JOINER.join([_PERSON, *pieces[1:]]), (_GENDERS[pieces[0]],)
    return text, ()
