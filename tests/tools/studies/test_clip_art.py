"""The Open Clip Art Library, in a folder of its packages' form."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from keras_moe import data
from tests.refusals import refuses
from tools.studies.clip_art import read_clip_art, write_folders

SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg"><title>not this one</title><metadata>
<rdf:RDF xmlns:cc="http://web.resource.org/cc/"
  xmlns:dc="http://purl.org/dc/elements/1.1/"
  xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><cc:Work rdf:about="">
<dc:title>{title}</dc:title>
<dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject>
<dc:publisher><cc:Agent><dc:title>Open Clip Art Library</dc:title></cc:Agent>
</dc:publisher>
<dc:creator><cc:Agent><dc:title>Jo Painter</dc:title></cc:Agent></dc:creator>
</cc:Work></rdf:RDF></metadata><path d="M0 0"/></svg>
"""


def write(root, name, title=None, keywords=(), size=(40, 20), seed=0):
    """A picture of random rectangles, which is unlike that of another seed."""
    png, svg = root / "png" / f"{name}.png", root / "svg" / f"{name}.svg"
    png.parent.mkdir(parents=True, exist_ok=True)
    svg.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGBA", size, (0, 0, 0, 0))
    draw, rng = ImageDraw.Draw(picture), np.random.default_rng(seed)
    for _ in range(6):
        x, y = rng.integers(size)
        colour = (*rng.integers(0, 256, 3).tolist(), 255)
        draw.rectangle([int(x), int(y), int(x) + 9, int(y) + 9], colour)
    picture.save(png)
    if title is not None:
        items = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords)
        svg.write_text(SVG.format(title=title, keywords=items))


@pytest.fixture
def root(tmp_path):
    """Where `dpkg -x` puts the pictures."""
    return tmp_path / "x" / "usr" / "share" / "openclipart"


def captions(tmp_path):
    return read_clip_art(tmp_path / "x").captions.tolist()


def test_captions_of_titles_and_keywords(root, tmp_path):
    write(root, "a/1", "Big  Bull", ["mammal", "bull", "jo painter", ""], seed=1)
    write(root, "a/b/2", "Clipart by Nicu - arrow", ["Road_Sign", "mammal"], seed=2)
    # Without metadata, and in a damaged file, the words are those of the name.
    write(root, "a/red_house_jo_pai_03", seed=3)
    write(root, "a/blue_house", "Blue", seed=4)
    (root / "svg" / "a" / "blue_house.svg").write_text("<svg><metadata>")
    words = ["big bull, mammal", "arrow, road sign, mammal"]
    assert captions(tmp_path) == [*words, "blue house", "red house jo pai"]


def test_a_title_of_a_whole_collection_says_nothing(root, tmp_path):
    for number in range(6):
        name = "abcdef"[number] * 3
        write(root, f"icons/{name}_jo_painter_01", "Jo's icons", ["icon"], seed=number)
    assert captions(tmp_path) == [f"{letter * 3}, icon" for letter in "abcdef"]


def test_pictures_are_on_white_and_keep_their_proportions(root, tmp_path):
    write(root, "a/1", "One", size=(128, 32), seed=1)
    (root / "png" / "b").mkdir()
    # The packages show a picture in other categories by links.
    (root / "png" / "b" / "1.png").symlink_to("../a/1.png")
    write(root, "b/2", "Two", size=(20, 10), seed=2)
    clip_art = read_clip_art(root)
    assert clip_art.images.shape == (2, 64, 64, 3)
    assert clip_art.categories.tolist() == ["a", "b"]
    wide, small = clip_art.images
    assert (wide[:24] == 255).all()
    assert (wide[40:] == 255).all()
    assert (wide[24:40] < 255).any()
    # A small one is not made larger.
    assert (small[:, :22] == 255).all()
    assert (small[27:37, 22:42] < 255).any()


def test_series_and_pictures_that_are_alike_have_one_split(root, tmp_path):
    for number in range(30):
        write(root, f"a/star_{number}pt", f"star {number}pt", seed=number)
    for number in range(30, 60):
        write(root, f"b/p{number}", f"thing {'ab'[number % 2] * number}", seed=1000)
    for number in range(60, 160):
        word = "".join("abcdefghij"[int(digit)] for digit in str(number))
        write(root, f"c/{word}", word, seed=number)
    everything = read_clip_art(root)
    series = np.array([name == "a" for name in everything.categories])
    copies = np.array([name == "b" for name in everything.categories])
    assert len(set(everything.splits[series])) == 1
    assert len(set(everything.splits[copies])) == 1
    others = everything.splits[~series & ~copies]
    assert all(4 <= (others == split).sum() <= 20 for split in ("validation", "test"))


def test_categories_are_classes(root, tmp_path):
    for number in range(40):
        # Titles of different words, so that they are no series.
        word = "".join("abcdefghij"[int(digit)] for digit in f"{number:02}")
        for kind, name in enumerate(("b", "a", "unsorted")):
            write(root, f"{name}/{number}", f"{name}{word}", seed=number + 100 * kind)
    write(root, "c/1", "one", seed=999)
    write_folders(root, tmp_path / "new" / "out")
    source, pairs = (f"folder:{tmp_path}/new/out/{x}" for x in ("classes", "pairs"))
    splits = ("train", "validation", "test")
    assert data.class_names(source) == ("a", "b")
    assert sum(data.num_examples(source, split) for split in splits) == 80
    labels = [
        int(label)
        for _, several in data.load(source, "train", (16, 16, 3), shuffle=False)
        for label in several
    ]
    assert labels == sorted(labels)
    # Every picture has a caption.
    captions = [x for split in splits for x in data.load_captions(pairs, split)]
    assert sorted(captions) == sorted(read_clip_art(root).captions)


def test_bad_folders(root, tmp_path):
    refuses(r"png and svg.*received: ", read_clip_art, tmp_path)
    write(root, "a/1", "one", seed=1)
    (root / "png" / "a" / "1.png").write_bytes(b"no picture")
    refuses(r"Expected pictures in .*: \['a/1\.png'\]", read_clip_art, root)


def test_a_damaged_picture_costs_no_other(root, tmp_path):
    for number in range(3):
        write(root, f"a/{number}", f"number {number}", seed=number)
    path = root / "png" / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.warns(UserWarning, match=r"1 of 3 pictures .* such as a/1\.png"):
        assert captions(tmp_path) == ["number 0", "number 2"]
