"""Folders of images: what is read, what is reported, and what cannot be read."""

import contextlib
import json
import os

import pytest

from keras_moe.data import (
    class_names,
    find_unreadable,
    load,
    load_captions,
    load_pairs,
    num_classes,
    num_examples,
    num_pairs,
    reading_errors,
    write_exclusion,
)
from tests.pipelines import SHAPE, check_resumption, levels, numbers, rows, save
from tests.refusals import refuses

tf = pytest.importorskip("tensorflow")

GREY = (4, 4, 1)


@pytest.fixture
def photos(tmp_path):
    """Images 0 to 9 of each of two classes, of which two cannot be read."""
    for number in range(20):
        save(tmp_path / "train" / "ab"[number // 10] / f"{number % 10}.png", number)
    (tmp_path / "train" / "a" / "3.png").write_bytes(b"")
    whole = (tmp_path / "train" / "b" / "5.png").read_bytes()
    (tmp_path / "train" / "b" / "5.png").write_bytes(whole[:-20])
    return tmp_path


def test_classes_are_those_of_all_splits(tmp_path):
    for number, name in enumerate(["train/b/0", "train/a/1", "test/b/2", "test/c/3"]):
        save(tmp_path / f"{name}.png", number)
    source = f"folder:{tmp_path}"
    assert class_names(source) == ("a", "b", "c")
    assert num_classes(source) == 3
    for split, expected in (("train", {0: 1, 1: 0}), ("test", {2: 1, 3: 2})):
        (batch,) = load(source, split, GREY).as_numpy_iterator()
        assert dict(zip(levels(batch[0]), batch[1].tolist())) == expected
    refuses(r"one of .'test', 'train'.*split='dev'", load, source, "dev")
    (tmp_path / "Val" / "a").mkdir(parents=True)
    refuses("received: 0 images", load, source, "Val")


def test_classes_without_splits_are_split(tmp_path):
    """The same images in every process, with some of each class in each part."""
    for number in range(24):
        save(tmp_path / ("a" if number < 20 else "b") / f"{number}.png", number)
    source, parts = f"folder:{tmp_path}", {}
    assert class_names(source) == ("a", "b")
    for split in ("train", "test"):
        (batch,) = load(source, split, GREY, 32, shuffle=False).as_numpy_iterator()
        parts[split] = levels(batch[0])
        assert batch[1].tolist() == [int(x >= 20) for x in parts[split]]
    assert sorted(parts["train"] + parts["test"]) == [*range(24)]
    assert [sum(x < 20 for x in parts[split]) for split in parts] == [16, 4]
    assert [sum(x >= 20 for x in parts[split]) for split in parts] == [3, 1]
    refuses(r"one of .'train', 'test'.*split='dev'", load, source, "dev")
    # Another image moves at most one.
    save(tmp_path / "a" / "99.png", 99)
    (batch,) = load(source, "test", GREY, 32, shuffle=False).as_numpy_iterator()
    assert class_names(source) == ("a", "b")
    assert len({*levels(batch[0])} & {*parts["test"]}) >= 4
    # With a folder in it, this is a split.
    save(tmp_path / "b" / "c" / "9.png", 9)
    (tmp_path / "a").rename(tmp_path / "b" / "a")
    assert class_names(source) == ("a", "c")
    refuses("If these are classes, put their images", load, source, "train")


def test_images_beside_classes_and_one_image_per_class(tmp_path):
    """Test images without labels do not make classes of the splits."""
    save(tmp_path / "train" / "a" / "0.png", 0)
    save(tmp_path / "train" / "b" / "1.png", 1)
    save(tmp_path / "test" / "2.png", 2)
    source = f"folder:{tmp_path}"
    assert class_names(source) == ("a", "b")
    with pytest.warns(UserWarning, match=r"not read: test/\."):
        (batch,) = load(source, "train", GREY).as_numpy_iterator()
    assert sorted(levels(batch[0])) == [0, 1]
    refuses(
        r"a fifth of each class for 'test'.* 0 images", load, f"{source}/train", "test"
    )


def test_an_image_that_cannot_be_read_is_named(photos):
    options = {"augment": "random_resized_crop", "shuffle": False}
    batches = load(f"folder:{photos}", "train", GREY, 1, **options)
    name = photos / "train" / "a" / "3.png"
    assert len(list(batches.take(3))) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=str(name)):
        list(batches)
    message = f"can be decoded; received: {name}$"
    with pytest.raises(ValueError, match=message), reading_errors():
        list(batches)
    name = photos / "train" / "a" / "0.png"
    name.unlink()
    message = f"can be read; received: {name}$"
    with pytest.raises(ValueError, match=message), reading_errors():
        list(batches)


@pytest.mark.parametrize(("broken", "options", "whole"), [
    ([0], {}, 0),
    (range(20), {"shuffle": True}, 0),
    # Image 6 is met in the fifth pass, and the run goes on in the fourth.
    ([6], {"repeat": True, "start_batch": 23}, 3),
])  # fmt: skip
def test_a_damaged_image_is_named_wherever_it_is(tmp_path, broken, options, whole):
    for number in range(20):
        save(tmp_path / "train" / "ab"[number // 10] / f"{number % 10}.png", number)
    settings = {"image_shape": GREY, "batch_size": 3, "shuffle": False, **options}
    batches = load(f"folder:{tmp_path}", "train", **settings)
    names = [tmp_path / "train" / "ab"[n // 10] / f"{n % 10}.png" for n in broken]
    for name in names:
        name.write_bytes(b"no image")
    with reading_errors():
        iterator = batches.as_numpy_iterator()
        for _ in range(whole):
            next(iterator)
    with pytest.raises(ValueError, match="can be decoded") as error, reading_errors():
        next(iterator)
    assert str(error.value).rpartition(" ")[2] in map(str, names)


@pytest.mark.parametrize("name", ["gone.png", "../0.png"])
def test_files_that_are_listed_and_not_there_are_named(tmp_path, name):
    save(tmp_path / "train" / "1.png", 0)
    for path in (tmp_path / "0.png", tmp_path / "train" / "0.txt"):
        path.write_bytes(b"")
    labels = {"1.png": ["a"], name: ["b"]}
    (tmp_path / "train" / "labels.json").write_text(json.dumps(labels))
    refuses(f"received: '{name}'", load, f"folder:{tmp_path}", "train", GREY, 1)


def test_images_that_cannot_be_read_are_left_out(photos):
    source, options = f"folder:{photos}", {"unreadable": "exclude", "shuffle": False}
    left = [n for n in range(20) if n not in (3, 15)]
    message = r"2 of 20 images of .*train/a/3\.png, .*train/b/5\.png$"
    with pytest.warns(UserWarning, match=message):
        assert numbers(load(source, "train", GREY, 18, **options)) == [left]
    with pytest.warns(UserWarning, match=message.replace("20", "19")):
        assert num_examples(source, "train", unreadable="exclude", exclude=[0]) == 17
    # Found once, for all runs.
    path = photos / "unreadable.json"
    unreadable = find_unreadable(source, "train")
    write_exclusion(path, source, "train", 20, unreadable)
    batches = load(source, "train", GREY, 18, shuffle=False, exclude=path)
    assert numbers(batches) == [left]
    other = photos / "other.json"
    write_exclusion(other, source, "train", 20, [0, 3], note="mine")
    assert num_examples(source, "train", exclude=[path, other]) == 17
    for file in (photos / "train").rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(ValueError, match="received: 20 of 20 images"):
        load(source, "train", GREY, unreadable="exclude")


@pytest.mark.filterwarnings("ignore:2 of 20 images")
def test_batches_follow_from_the_arguments_without_unreadable_images(photos):
    def batches(take, **options):
        options |= {"repeat": True, "unreadable": "exclude", "augment": "flip"}
        dataset = load(f"folder:{photos}", "train", GREY, 6, seed=3, **options)
        return numbers(dataset.take(take))

    whole = check_resumption(batches, 9, (1, 5, 6))
    left = [n for n in range(20) if n not in (3, 15)]
    assert sorted(n for batch in whole[:3] for n in batch) == left


def test_folders_within_those_of_classes(tmp_path):
    for number, name in enumerate(["a/x/1", "a/0", "a/y/z/2", "b/0"]):
        save(tmp_path / "train" / f"{name}.png", number)
    os.symlink(tmp_path / "train" / "a", tmp_path / "train" / "a" / "y" / "again")
    save(tmp_path / "train" / "a" / ".hidden" / "3.png", 9)
    actual = load(f"folder:{tmp_path}", "train", GREY, 4, shuffle=False)
    # In the order of the paths.
    assert numbers(actual) == [[1, 0, 2, 3]]


def test_links_and_pipes_lead_nowhere_else(tmp_path):
    outside = tmp_path / "outside"
    save(outside / "0.png", 0)
    root = tmp_path / "photos"
    save(root / "train" / "a" / "0.png", 0)
    save(root / "train" / "b" / "0.png", 1)
    # Reading a pipe would wait for a writer.
    os.mkfifo(root / "train" / "a" / "1.png")
    actual = load(f"folder:{root}", "train", GREY, 2, shuffle=False)
    assert numbers(actual) == [[0, 1]]
    for target in (outside, outside / "0.png"):
        link = root / "train" / "a" / "link.png"
        link.symlink_to(target)
        with pytest.raises(ValueError, match=r"links to stay within .*link\.png"):
            load(f"folder:{root}", "train", GREY, 2)
        link.unlink()
    (root / "train" / "c").symlink_to(outside)
    refuses("links to stay within", load, f"folder:{root}", "train", GREY, 2)


def test_folders_that_are_nested_once_more_are_refused(tmp_path):
    for folder in ("photos/train/a", "photos/test/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.png").write_bytes(b"")
    refuses("named like splits", load, f"folder:{tmp_path}", "photos", GREY, 2)


@pytest.mark.parametrize(("beside", "named"), [
    (["__MACOSX/train/a/x.png"], "__MACOSX/"),
    (["train/@eaDir/0.png", "train/a/@eaDir/0.png"], "train/@eaDir/, train/a/@eaDir/"),
    (["train/.ipynb_checkpoints/0.png", ".git/x/0.png", "train/a/.x.png"], None),
    (["train/c/none.txt", "train/a/0.tif", "0.png"], "0.png, train/a/0.tif, train/c/"),
    # As in Tiny ImageNet: only train/ has labels.
    (["val/images/0.png", "test/images/0.png"], "test/, val/"),
    # Other splits, by name and by their classes.
    (["TEST2017/c/0.png", "TEST2017/a/0.png", "more/b/0.png"], None),
    (["train/a/Thumbs.db", "desktop.ini"], None),
    # More than five.
    ([f"{n}.txt" for n in range(9)], "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 4 more"),
])  # fmt: skip
def test_what_lies_beside_classes(tmp_path, beside, named):
    """It is no class, and is named once, by the load that comes first."""
    for number, name in enumerate(["a", "b"]):
        save(tmp_path / "train" / name / "0.png", number)
    for name in beside:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("png"):
            save(tmp_path / name, 9)
        else:
            (tmp_path / name).write_bytes(b"")
    source = f"folder:{tmp_path}"
    expected = contextlib.nullcontext()
    if named:
        expected = pytest.warns(
            UserWarning, match=f"In {tmp_path} not read: {named}\\. I"
        )
    with expected:
        batches = load(source, "train", GREY, shuffle=False)
    assert numbers(batches) == [[0, 1]]
    has_c = any(name.startswith("TEST") for name in beside)
    assert class_names(source) == (("a", "b", "c") if has_c else ("a", "b"))
    assert num_examples(source, "train") == 2
    if "more/b/0.png" in beside:
        assert numbers(load(source, "more", GREY)) == [[9]]
    refuses(r"one of .*'train'.*split='runs'", load, source, "runs")


@pytest.mark.parametrize("name", ["0.png", "train/0.png"])
def test_photos_outside_of_classes_are_told_the_layout(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    save(tmp_path / name, 0)
    source = f"folder:{tmp_path}"
    message = rf"such as {tmp_path}/train/cat/1\.jpg; received: 1 images, none"
    refuses(message, num_classes, "folder:~")
    refuses(message, load, source, "train", GREY)
    # A folder without its kind.
    refuses(rf"images is '{source}'", num_classes, str(tmp_path))


def test_files_that_are_not_listed_are_named(tmp_path):
    save(tmp_path / "train" / "a" / "0.png", 0)
    save(tmp_path / "train" / "1.png", 1)
    save(tmp_path / "train" / "2.png", 2)
    (tmp_path / "train" / "labels.json").write_text('{"1.png": ["a", "b"]}')
    with pytest.warns(UserWarning, match=r"not read: train/2\.png, train/a/\."):
        assert num_examples(f"folder:{tmp_path}", "train") == 1


def read(folder, **options):
    """The images, the captions and the ids of the images of one batch of pairs."""
    dataset = load_pairs(f"folder:{folder}", "train", SHAPE, shuffle=False, **options)
    return [list(column) for column in [*zip(*rows(dataset)[0])][:3]]


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(["a.png", "sub/b.png", "ü.png"]):
        save(tmp_path / "train" / name, number)
    return tmp_path


def test_csv_and_jsonl(folder):
    file = folder / "train/captions.csv"
    # Another column, a comma, a line break in quotes, and a second caption.
    text = 'id,image,caption\n7,sub/b.png,"a bee,\nflying"\n8,a.png,an ant\n'
    text += "9,sub/b.png,a bumblebee\n10,ü.png,größer\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = [[1, 1, 0, 2], ["a bee,\nflying", "a bumblebee", "an ant", "größer"]]
    expected.append([0, 0, 1, 2])
    assert read(folder, captions="all") == expected
    source = f"folder:{folder}"
    assert load_captions(source, "train") == tuple(expected[1])
    assert num_pairs(source, "train") == 3
    file.unlink()
    lines = [
        {"file_name": "sub/b.png", "captions": ["a bee,\nflying", "a bumblebee"]},
        {"image": "a.png", "caption": "an ant"},
        {"image": "ü.png", "text": "größer"},
    ]
    content = "\n".join(map(json.dumps, lines)) + "\n\n"
    (folder / "train/captions.jsonl").write_text(content)
    assert read(folder, captions="all") == expected
    file.write_text("image,caption\n")
    refuses(r"one file of captions in .*captions\.jsonl", read, folder)


def test_one_image_by_two_paths_within_the_folder(folder):
    (folder / "train/captions.csv").write_text(
        "image,caption\n./a.png, an ant \na.png,another\nsub//b.png,b\nü.png,u\n"
    )
    expected = [[0, 0, 1, 2], ["an ant", "another", "b", "u"], [0, 0, 1, 2]]
    assert read(folder, captions="all") == expected
    # A split does not lead out of its folder.
    (folder / "other/class").mkdir(parents=True)
    for split in ("../train", ".", "sub/../train"):
        refuses("Expected", load_pairs, f"folder:{folder / 'other'}", split, SHAPE)
    refuses("Expected", load_pairs, f"folder:{folder}", "other/../train", SHAPE)


def test_faults_of_captions_are_named_or_left_out(folder):
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
    with pytest.raises(ValueError, match="4 of 6 images") as error:
        load_pairs(source, "train", SHAPE)
    for message in (
        r"gone.png is not there",
        r"sub/b.png has a caption that is not text in UTF-8",
        r"captions.jsonl, line 4 names no image",
        r"ü.png has no caption",
    ):
        assert message in str(error.value)
    with pytest.warns(UserWarning, match=r"\d of \d images") as warned:
        assert read(folder, unreadable="exclude") == [[0], ["an ant"], [0]]
    messages = [str(warning.message) for warning in warned]
    assert any(x.startswith("4 of 6 images") for x in messages)
    assert any("1 of 2 images" in x and "bad.png" in x for x in messages)
    assert num_pairs(source, "train", exclude=[1, 2, 3, 5]) == 2
    # The image that cannot be decoded ends the pass, by its name.
    refuses(r"can be decoded.*bad\.png", read, folder, exclude=[1, 2, 3, 5])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("captions.csv", "picture,caption\na.png,an ant\n", "a column.*'picture'"),
    ("captions.csv", "image,caption\na.png,a cat, asleep\n", "line 2 has more"),
    ("captions.csv", "image,caption\n../a.png,an ant\n", r"'\.\./a\.png'.*line 2"),
    ("captions.jsonl", '{"image": "/a.png", "caption": "x"}', "'/a.png' in line 1"),
    ("captions.jsonl", '{"image": "a.png", "caption": 7}', "UTF-8: 7"),
])  # fmt: skip
def test_bad_files_of_captions(folder, name, content, message):
    (folder / "train" / name).write_text(content)
    refuses(message, read, folder)
