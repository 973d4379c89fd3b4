"""Emoji taken apart, named and split, without a picture."""

import collections
import sys

import pytest

from keras_moe.data.emoji.names import LANGUAGES, all_emoji, captions, subgroups
from keras_moe.data.emoji.parts import code_of, parts_of
from keras_moe.data.emoji.splits import split_of

pytestmark = pytest.mark.backend_free

TONES = ("light", "medium-light", "medium", "medium-dark", "dark")


def text_of(code):
    return "".join(chr(int(sign, 16)) for sign in code.split("-"))


# From Unicode's emoji-test.txt.
NAMES = {
    "1F600": "grinning face",
    "1F48B": "kiss mark",
    "1F469": "woman",
    "1F469-1F3FF-200D-1F692": "woman firefighter: dark skin tone",
    "1F469-1F3FF-200D-1F9B0": "woman: dark skin tone, red hair",
    "1F9D4-1F3FC-200D-2642-FE0F": "man: medium-light skin tone, beard",
    "1F471-200D-2640-FE0F": "woman: blond hair",
    "1F575-FE0F-200D-2640-FE0F": "woman detective",
    "1F575-1F3FB-200D-2640-FE0F": "woman detective: light skin tone",
    "1F468-200D-1F469-200D-1F467-200D-1F466": "family: man, woman, girl, boy",
    "1F48F-1F3FF": "kiss: dark skin tone",
    "1F469-1F3FF-200D-2764-FE0F-200D-1F48B-200D-1F468-1F3FB": (
        "kiss: woman, man, dark skin tone, light skin tone"
    ),
    "1F491": "couple with heart",
    "1FAF1-1F3FB-200D-1FAF2-1F3FF": "handshake: light skin tone, dark skin tone",
    "1F1E9-1F1EA": "flag: Germany",
    "1F3F4-E0067-E0062-E0065-E006E-E0067-E007F": "flag: England",
    "1F3F4-200D-2620-FE0F": "pirate flag",
    "31-FE0F-20E3": "keycap: 1",
}


def test_captions_are_unicode_s():
    names = captions("en")
    assert {code: names[text_of(code)] for code in NAMES} == NAMES


@pytest.mark.parametrize(
    ("code", "base", "modifiers"),
    [
        ("1F600", "1F600", ()),
        ("2764-FE0F", "2764", ()),
        ("1F44B-1F3FF", "1F44B", ("dark skin tone",)),
        ("1F469", "1F9D1", ("woman",)),
        (
            "1F469-1F3FF-200D-1F692",
            "1F9D1-200D-1F692",
            ("woman", "dark skin tone"),
        ),
        (
            "1F468-1F3FB-200D-1F9B1",
            "1F9D1",
            ("man", "curly hair", "light skin tone"),
        ),
        (
            "1F3C3-1F3FD-200D-2640-FE0F-200D-27A1-FE0F",
            "1F3C3",
            ("woman", "facing right", "medium skin tone"),
        ),
        ("1F46D", "1F9D1-200D-1F91D-200D-1F9D1", ("woman",)),
        (
            "1F469-1F3FB-200D-1F91D-200D-1F468-1F3FF",
            "1F9D1-200D-1F91D-200D-1F9D1",
            ("woman", "man", "light skin tone", "dark skin tone"),
        ),
        ("1F468-200D-2764-FE0F-200D-1F468", "1F491", ("man",)),
        ("1F9D1-200D-1F9D1-200D-1F9D2", "1F46A", ("adult", "adult", "child")),
        ("1F469-200D-1F466", "1F46A", ("woman", "boy")),
        (
            "1FAF1-1F3FB-200D-1FAF2-1F3FF",
            "1F91D",
            ("light skin tone", "dark skin tone"),
        ),
        ("2764-FE0F-200D-1F525", "2764-200D-1F525", ()),
        ("1F408-200D-2B1B", "1F408-200D-2B1B", ()),
    ],
)
def test_parts(code, base, modifiers):
    actual = parts_of(text_of(code))
    assert (code_of(actual.base), actual.modifiers) == (base, modifiers)


def test_every_emoji_has_one_name_in_each_language():
    emoji = all_emoji()
    assert len(emoji) > 3600
    assert len({one.text for one in emoji}) == len(emoji)
    for language in LANGUAGES:
        names = captions(language)
        assert set(names) == {one.text for one in emoji}, language
        assert len(set(names.values())) == len(emoji), language
        for name in names.values():
            assert name == name.strip(), (language, name)
            assert "_" not in name, (language, name)
            assert "  " not in name, (language, name)
    firefighter = text_of("1F469-1F3FF-200D-1F692")
    assert captions("fr")[firefighter] == "pompier femme: peau foncée"
    assert captions("de")[firefighter] == "feuerwehrfrau: dunkle hautfarbe"


def test_subgroups_follow_unicode():
    groups = subgroups()
    bases = [base for _, members in groups.values() for base in members]
    assert len(bases) == len(set(bases))
    # A base is an emoji without modifiers, and each has emoji.
    assert all(parts_of(base) == (base, ()) for base in bases)
    assert {one.parts.base for one in all_emoji()} == set(bases)
    by_text = {one.text: (one.group, one.subgroup) for one in all_emoji()}
    assert next(iter(groups)) == "face-smiling"
    assert by_text[text_of("1F469-1F3FF-200D-1F692")] == (
        "People & Body",
        "person-role",
    )
    assert by_text[text_of("1F1E9-1F1EA")] == ("Flags", "country-flag")
    assert by_text[text_of("1FAE9")] == ("Smileys & Emotion", "face-sleepy")


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_splits_are_made_by_concept(seed):
    emoji = all_emoji()
    splits = {one.text: split_of(one.parts, seed) for one in emoji}
    sizes = collections.Counter(splits.values())
    assert set(sizes) == {"train", "validation", "test"}
    for split in ("validation", "test"):
        assert 0.05 < sizes[split] / len(emoji) < 0.15
    # All skin tones of a woman firefighter are in one split.
    tones = ("", *(chr(tone) for tone in range(0x1F3FB, 0x1F400)))
    same = {splits[f"\U0001f469{tone}\u200d\U0001f692"] for tone in tones}
    assert len(same) == 1
    of_base = collections.defaultdict(set)
    for one in emoji:
        of_base[one.parts.base].add(splits[one.text])
    # A man firefighter, which is drawn otherwise, may be in another one.
    assert max(map(len, of_base.values())) == 3


def test_another_seed_holds_out_others():
    first, second = (
        [split_of(one.parts, seed) for one in all_emoji()] for seed in (0, 1)
    )
    assert first != second


def test_without_the_package_of_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "emoji", None)
    with pytest.raises(ImportError, match=r"keras-moe\[emoji\]"):
        captions.__wrapped__("en")
