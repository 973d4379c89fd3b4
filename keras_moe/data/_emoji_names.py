"""Emoji by name: parts, groups, captions by language, and splits.

An emoji is a base with modifiers: `woman firefighter: dark skin tone` has two. Parsing
Unicode's sequences of code points needs no names, so the result is the same in every
language. The package `emoji` has names without punctuation, which is restored here.

Splits are by concept (an emoji regardless of skin tone), follow from the seed and the
code points, and stay the same when emoji are added.
"""

import functools
import json
import re
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from keras_moe.data._files import held_out_split
from keras_moe.data._packages import extra

LANGUAGES = (
    *("ar", "de", "en", "es", "fa", "fr", "id"),
    *("it", "ja", "ko", "pt", "ru", "tr", "zh"),
)
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
# Symbols at the end of a sequence.
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
# Symbols between two people, and the emoji without a gender.
_PAIRS = {
    ("\U0001f91d",): f"{_PERSON}{JOINER}\U0001f91d{JOINER}{_PERSON}",
    ("\U0001f430",): "\U0001f46f",
    ("\U0001faef",): "\U0001f93c",
    (_HEART,): "\U0001f491",
    (_HEART, "\U0001f48b"): "\U0001f48f",
}
_HANDS = _PAIRS["\U0001f91d",]
# Combinations with their own code point, or another sequence.
_ALIKE = {
    "\U0001f46b": (_HANDS, ("woman", "man")),
    "\U0001f46c": (_HANDS, ("man",)),
    "\U0001f46d": (_HANDS, ("woman",)),
    f"\U0001faf1{JOINER}\U0001faf2": ("\U0001f91d", ()),
}
# Appearances and people, which English names list after a colon.
_LOOKS = re.compile(
    rf" (?=(?:{'|'.join([*SKIN_TONES.values(), *HAIR.values()])}|beard|blond hair)\b)"
)
_OF_PEOPLE = re.compile(
    "(couple with heart|family|kiss)((?: (?:adult|boy|child|girl|man|person|woman))+)"
)
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}|\U0001f3f4[\U000e0020-\U000e007f]+")


class Parts(NamedTuple):
    """The base and modifiers of an emoji."""

    base: str
    modifiers: tuple[str, ...]


def parts_of(emoji: str) -> Parts:
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
    """Returns the code points of an emoji, such as `"1F469-200D-1F692"`."""
    return "-".join(f"{ord(sign):04X}" for sign in emoji)


def _people(pieces: list[str]) -> tuple[str, tuple[str, ...]]:
    """Returns the base without final symbols, and the people's modifiers."""
    text = JOINER.join(pieces)
    if text in _ALIKE:
        return _ALIKE[text]
    if len(pieces) > 1 and all(piece in _MEMBERS for piece in pieces):
        return _FAMILY, tuple(_MEMBERS[piece] for piece in pieces)
    first, *between, last = pieces if len(pieces) > 2 else (text, "")
    if tuple(between) in _PAIRS:
        # Two women become one modifier; people without a gender have none.
        genders = dict.fromkeys(_GENDERS[x] for x in (first, last) if x in _GENDERS)
        return _PAIRS[tuple(between)], tuple(genders)
    if pieces[0] in _GENDERS:
        return JOINER.join([_PERSON, *pieces[1:]]), (_GENDERS[pieces[0]],)
    return text, ()


class Emoji(NamedTuple):
    """An emoji, independent of its language."""

    text: str
    parts: Parts
    subgroup: str
    group: str


@functools.cache
def subgroups() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns the group and the bases of each Unicode subgroup, in Unicode's order."""
    path = Path(__file__).with_name("emoji_subgroups.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        subgroup: (group, tuple(bases.split()))
        for group, members in table["groups"].items()
        for subgroup, bases in members.items()
    }


@functools.cache
def all_emoji() -> tuple[Emoji, ...]:
    """Returns all emoji with a known subgroup, in Unicode's order of their bases."""
    position = {
        base: (number, subgroup, group)
        for number, (subgroup, group, base) in enumerate(
            (subgroup, group, base)
            for subgroup, (group, bases) in subgroups().items()
            for base in bases
        )
    }
    package = _package()
    qualified = package.STATUS["fully_qualified"]
    texts = sorted(
        text
        for text, entry in package.EMOJI_DATA.items()
        if entry["status"] == qualified
    )
    entries = [(text, parts_of(text)) for text in texts]
    known = [(text, parts) for text, parts in entries if parts.base in position]
    known.sort(key=lambda entry: position[entry[1].base][0])
    return tuple(Emoji(text, parts, *position[parts.base][1:]) for text, parts in known)


@functools.cache
def captions(language: str) -> dict[str, str]:
    """Returns the captions of all emoji by their text."""
    package = _package()
    package.config.load_language(language)
    names = {}
    for text, entry in package.EMOJI_DATA.items():
        if language in entry:
            name = unicodedata.normalize("NFC", entry[language]).strip(":")
            # Without underscores and punctuation.
            names[text] = " ".join(re.sub("[_,]", " ", name).split())
    make = _english if language == "en" else _punctuated
    return {
        emoji.text: make(emoji.text, names)
        for emoji in all_emoji()
        if emoji.text in names
    }


def _package() -> ModuleType:
    with extra("emoji"):
        import emoji
    return emoji


def _punctuated(text: str, names: dict[str, str]) -> str:
    """Restores the colon before skin tones and hair."""
    name = names[text]
    looks = "".join([*SKIN_TONES, *HAIR])
    plain = re.sub(f"{JOINER}?[{looks}]", "", text)
    # Some bases need a variation selector if they have no modifiers.
    for base in (plain, plain + EMOJI_STYLE, plain.replace(EMOJI_STYLE, "")):
        start = names.get(base, name)
        if name.startswith(f"{start} "):
            return f"{start}: {name[len(start) :].strip()}"
    return name


def _english(text: str, names: dict[str, str]) -> str:
    """Restores Unicode's punctuation of an English name."""
    name = names[text]
    if _FLAG.fullmatch(text):
        return f"flag: {name}"
    if name.startswith("keycap "):
        return name.replace(" ", ": ", 1)
    start, *listed = _LOOKS.split(name)
    if people := _OF_PEOPLE.fullmatch(start):
        start, listed = people[1], [*people[2].split(), *listed]
    return f"{start}: {', '.join(listed)}" if listed else name


def split_of(parts: Parts, seed: int) -> str:
    """Returns the split of an emoji, which depends on its concept."""
    tones = SKIN_TONES.values()
    concept = [code_of(parts.base), *(x for x in parts.modifiers if x not in tones)]
    return held_out_split(f"{seed} {' '.join(concept)}".encode())
