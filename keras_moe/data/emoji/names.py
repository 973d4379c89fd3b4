"""Captions of emoji: Unicode's names by language, and its groups and subgroups.

The package `emoji` has the names without their punctuation, which comes back here.
"""

import functools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

from keras_moe.data.emoji.parts import (
    EMOJI_STYLE,
    HAIR,
    JOINER,
    SKIN_TONES,
    Parts,
    parts_of,
)

LANGUAGES = (
    *("ar", "de", "en", "es", "fa", "fr", "id"),
    *("it", "ja", "ko", "pt", "ru", "tr", "zh"),
)
# Looks and people, which English names list after a colon.
_LOOKS = re.compile(
    rf" (?=(?:{'|'.join([*SKIN_TONES.values(), *HAIR.values()])}|beard|blond hair)\b)"
)
_OF_PEOPLE = re.compile(
    "(couple with heart|family|kiss)((?: (?:adult|boy|child|girl|man|person|woman))+)"
)
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}|\U0001f3f4[\U000e0020-\U000e007f]+")


class Emoji(NamedTuple):
    """An emoji of the set, whatever its style and language."""

    text: str
    parts: Parts
    subgroup: str
    group: str


@functools.cache
def subgroups() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The group and the bases of each of Unicode's subgroups, in Unicode's order."""
    path = Path(__file__).with_name("subgroups.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        subgroup: (group, tuple(bases.split()))
        for group, members in table["groups"].items()
        for subgroup, bases in members.items()
    }


@functools.cache
def all_emoji() -> tuple[Emoji, ...]:
    """All emoji with a known subgroup, in Unicode's order of their bases."""
    place = {
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
    known = [(text, parts) for text, parts in entries if parts.base in place]
    known.sort(key=lambda entry: place[entry[1].base][0])
    return tuple(Emoji(text, parts, *place[parts.base][1:]) for text, parts in known)


@functools.cache
def captions(language: str) -> dict[str, str]:
    """The captions of all emoji by their text."""
    package = _package()
    package.config.load_language(language)
    names = {
        text: _plain(entry[language])
        for text, entry in package.EMOJI_DATA.items()
        if language in entry
    }
    make = _english if language == "en" else _punctuated
    return {
        emoji.text: make(emoji.text, names)
        for emoji in all_emoji()
        if emoji.text in names
    }


def _package() -> Any:
    try:
        import emoji
    except ImportError as error:
        raise ImportError(
            'Names of emoji come from a package: pip install "keras-moe[emoji]"'
        ) from error
    return emoji


def _plain(name: str) -> str:
    """A name without colons and underscores."""
    name = unicodedata.normalize("NFC", name).strip(":").replace("_", " ")
    return " ".join(name.replace(",", " ").split())


def _punctuated(text: str, names: dict[str, str]) -> str:
    """A name with a colon before the skin tones and hair."""
    name = names[text]
    looks = "".join([*SKIN_TONES, *HAIR])
    plain = re.sub(f"{JOINER}?[{looks}]", "", text)
    # Without modifiers some bases need a variation selector.
    for base in (plain, plain + EMOJI_STYLE, plain.replace(EMOJI_STYLE, "")):
        start = names.get(base, name)
        if name.startswith(f"{start} "):
            return f"{start}: {name[len(start) :].strip()}"
    return name


def _english(text: str, names: dict[str, str]) -> str:
    """A name with Unicode's punctuation."""
    name = names[text]
    if _FLAG.fullmatch(text):
        return f"flag: {name}"
    if name.startswith("keycap "):
        return name.replace(" ", ": ", 1)
    start, *listed = _LOOKS.split(name)
    if people := _OF_PEOPLE.fullmatch(start):
        start, listed = people[1], [*people[2].split(), *listed]
    return f"{start}: {', '.join(listed)}" if listed else name
