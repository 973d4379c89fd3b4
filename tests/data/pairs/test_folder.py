"""Folders of images with a file of captions."""

import json

import numpy as np
import pytest

from keras_moe.data import load_captions, load_pairs, num_pairs, reading_errors

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free

SHAPE = (4, 4, 3)


def write_images(folder, names):
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full(SHAPE, number, "uint8")
        path.write_bytes(tf.io.encode_png(pixels).numpy())


def read(folder, **options):
    dataset = load_pairs(f"folder:{folder}", "train", SHAPE, shuffle=False, **options)
    with reading_errors():
        inputs, ids = next(dataset.as_numpy_iterator())
    pixels = np.round((inputs["images"][:, 0, 0, 0] + 1) * 127.5).astype(int).tolist()
    return pixels, [x.decode() for x in inputs["captions"]], ids


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "train", ["a.png", "sub/b.png", "ü.png"])
    return tmp_path


def test_csv_and_jsonl(folder):
    file = folder / "train/captions.csv"
    # Another column, a comma, a line break in quotes, and a second caption.
    text = 'id,image,caption\n7,sub/b.png,"a bee,\nflying"\n8,a.png,an ant\n'
    text += "9,sub/b.png,a bumblebee\n10,ü.png,größer\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = [1, 1, 0, 2], ["a bee,\nflying", "a bumblebee", "an ant", "größer"]
    pixels, captions, ids = read(folder, captions="all")
    assert (pixels, captions) == expected
    assert ids["image_ids"].tolist() == [0, 0, 1, 2]
    source = f"folder:{folder}"
    assert load_captions(source, "train") == tuple(captions)
    assert num_pairs(source, "train") == 3
    file.unlink()
    lines = [
        {"file_name": "sub/b.png", "captions": ["a bee,\nflying", "a bumblebee"]},
        {"image": "a.png", "caption": "an ant"},
        {"image": "ü.png", "text": "größer"},
    ]
    content = "\n".join(map(json.dumps, lines)) + "\n\n"
    (folder / "train/captions.jsonl").write_text(content)
    assert read(folder, captions="all")[:2] == expected
    file.write_text("image,caption\n")
    with pytest.raises(ValueError, match=r"one file of captions in .*captions\.jsonl"):
        read(folder)


def test_one_image_by_two_paths_within_the_folder(folder):
    (folder / "train/captions.csv").write_text(
        "image,caption\n./a.png, an ant \na.png,another\nsub//b.png,b\nü.png,u\n"
    )
    pixels, captions, ids = read(folder, captions="all")
    assert (pixels, captions) == ([0, 0, 1, 2], ["an ant", "another", "b", "u"])
    assert ids["image_ids"].tolist() == [0, 0, 1, 2]
    # A split does not lead out of its folder.
    (folder / "other/class").mkdir(parents=True)
    for split in ("../train", ".", "sub/../train"):
        with pytest.raises(ValueError, match="Expected"):
            load_pairs(f"folder:{folder / 'other'}", split, SHAPE)
    with pytest.raises(ValueError, match="Expected"):
        load_pairs(f"folder:{folder}", "other/../train", SHAPE)


def test_faults_are_named_or_left_out(folder):
    file = folder / "train/captions.jsonl"
    entries = [
        b'{"image": "a.png", "caption": "an ant"}',
        b'{"image": "gone.png", "caption": "a ghost"}',
        b'{"image": "sub/b.png", "caption": "caf\xe9"}',
        b"{not JSON",
        b'{"image": "bad.png", "caption": "noise"}',
    ]
    file.write_bytes(b"\n".join(entries))
    (folder / "train/bad.png").write_bytes(b"no picture")
    source = f"folder:{folder}"
    with pytest.raises(ValueError, match="4 faults in 6 images") as error:
        load_pairs(source, "train", SHAPE)
    for message in (
        r"gone.png is not there",
        r"sub/b.png has a caption that is not UTF-8",
        r"captions.jsonl, line 4 names no image",
        r"ü.png has no caption",
    ):
        assert message in str(error.value)
    with pytest.warns(UserWarning, match="of 6 images") as warned:
        pixels, captions, ids = read(folder, unreadable="exclude")
    assert (pixels, captions) == ([0], ["an ant"])
    assert ids["image_ids"].tolist() == [0]
    messages = [str(warning.message) for warning in warned]
    assert any(x.startswith("4 of 6 images") for x in messages)
    assert any("1 of 2 images" in x and "bad.png" in x for x in messages)
    assert num_pairs(source, "train", exclude=[1, 2, 3, 5]) == 2
    # The image that cannot be decoded ends the pass, by its name.
    with pytest.raises(ValueError, match=r"can be decoded.*bad\.png"):
        read(folder, exclude=[1, 2, 3, 5])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.csv", "picture,caption\na.png,an ant\n", "one column.*'picture'"),
        ("captions.csv", "", "column"),
        ("captions.csv", "image,caption,caption\na.png,x,y\n", "one column.*'caption'"),
        ("captions.csv", "image,caption\na.png,a cat, asleep\n", "line 2 has more"),
        ("captions.csv", 'image,caption\na.png,"a\nü.png,b\n', "rows of a CSV file"),
        ("captions.csv", 'image,"caption\na.png,a\n', "rows of a CSV file"),
        ("captions.csv", "image,caption\n../a.png,an ant\n", r"'\.\./a\.png'.*line 2"),
        ("captions.jsonl", '{"image": "/a.png", "caption": "x"}', "'/a.png' in line 1"),
        ("captions.csv", "image,caption\na.png\n", "a.png has no caption"),
        ("captions.jsonl", '{"image": "a.png", "caption": 7}', "caption: 7"),
        ("captions.jsonl", '{"image": "a.png", "captions": []}', "a.png has no"),
        ("captions.jsonl", "[" * 100_000, "line 1 names no image"),
    ],
)
def test_bad_files(folder, name, content, message):
    (folder / "train" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read(folder)
