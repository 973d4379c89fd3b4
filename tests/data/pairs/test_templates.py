"""Names of classes as captions."""

import json

import numpy as np
import pytest

from keras_moe.data import load_captions, load_pairs, num_pairs, write_tfrecords

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free

TEMPLATES = ["a photo of a {}.", "the digit {}"]


def test_digits_have_captions_by_templates(pair_tools, tmp_path):
    file = tmp_path / "templates.txt"
    file.write_text("\n".join(TEMPLATES) + "\n\n")
    options = {"templates": file, "batch_size": 150, "shuffle": False}
    dataset = load_pairs("digits", "test", (8, 8, 1), **options)
    first, *_ = pair_tools.rows(dataset)
    captions = {caption for _, caption, _, _ in first}
    expected = {t.replace("{}", str(c)) for t in TEMPLATES for c in range(10)}
    assert captions == expected
    # Ids are those of the captions, not of the classes.
    assert len({row[3] for row in first}) == 20
    assert [row[2] for row in first] == list(range(150))
    # Another pass draws other templates for the same images.
    again, *_ = pair_tools.rows(dataset)
    assert [row[1] for row in again] != [row[1] for row in first]
    options = {"templates": TEMPLATES, "captions": "all"}
    assert num_pairs("digits", "test", **options) == 900
    assert load_captions("digits", "test", **options)[:2] == (
        "a photo of a 0.",
        "the digit 0",
    )
    every = load_pairs("digits", "test", (8, 8, 1), 4, shuffle=False, **options)
    four = pair_tools.rows(every, 1)[0]
    assert [row[2] for row in four] == [0, 0, 1, 1]
    assert four[0][1].startswith("a photo")
    assert four[1][1].startswith("the digit")
    # The bare name is the default.
    bare = pair_tools.rows(load_pairs("digits", "test", (8, 8, 1), 4), 1)[0]
    assert all(row[1] in "0123456789" for row in bare)


def test_classes_in_record_files(pair_tools, tmp_path):
    examples = [(pair_tools.png(i), i % 2) for i in range(6)]
    write_tfrecords(tmp_path, "train", examples, ["cat", "dog"])
    options = {"templates": "a {}", "shuffle": False}
    source = f"tfrecord:{tmp_path}"
    (batch,) = pair_tools.rows(load_pairs(source, "train", pair_tools.shape, **options))
    assert [row[:2] for row in batch] == [
        (i, f"a {['cat', 'dog'][i % 2]}") for i in range(6)
    ]
    assert len({row[2] for row in batch}) == 6
    with pytest.raises(ValueError, match='captions="all"'):
        load_pairs(source, "train", captions="all", **options)
    # Numbers of classes are no names.
    sidecar = tmp_path / "dataset.json"
    content = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**content, "classes": 2}))
    with pytest.raises(ValueError, match="2 classes without"):
        load_pairs(source, "train")


def test_bad_templates(tmp_path):
    for templates, message in (
        (["a {}", "a photo"], "one place {} for the name; received: 'a photo'"),
        ("{} and {}", "one place.*'{} and {}'"),
        ("a photo", "a place {} for the name, or their file.*'a photo'"),
        ([], r"received: \[\]"),
        (7, "received: 7"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pairs("digits", "test", (8, 8, 1), templates=templates)
    arrays = (np.zeros((1, 4, 4, 3), "uint8"), ["a cat"])
    with pytest.raises(ValueError, match=r"source of classes alone.*\['arrays'\]"):
        load_pairs(arrays, "test", templates="a {}")
    with pytest.raises(ValueError, match="received: source='flickr'"):
        load_pairs("flickr", "test")
    with pytest.raises(ValueError, match=r"a tuple of images.*received: list"):
        load_pairs(["digits"], "test")


def test_a_name_of_two_classes(monkeypatch):
    from keras_moe.data import digits

    for names, message in (
        (("crane", "cat", "crane", *"3456789"), "'crane' for classes 0 and 2"),
        (("0", " ", *"23456789"), "an empty caption for class 1"),
    ):
        monkeypatch.setattr(digits, "CLASS_NAMES", names)
        with pytest.raises(ValueError, match=message):
            load_pairs("digits", "test", (8, 8, 1))
