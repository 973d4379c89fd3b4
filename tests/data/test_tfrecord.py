"""TFRecord files, and what every source can do: several labels, shards, exclusion."""

import json

import numpy as np
import pytest

from keras_moe import data
from tests.pipelines import SHAPE, check_resumption, levels, picture, png, rows, save
from tests.refusals import refuses

tf = pytest.importorskip("tensorflow")


CLASSES = ["animal", "bee", "cat", "rock"]
# The labels of example n.
SEVERAL = [[1], [2, 3], [], [3], [1, 2], [3, 1], [2]]


def write(folder, count=23, num_files=3, labels=None, split="train", **options):
    labels = labels or (lambda index: index % 4)
    examples = ((picture(index), labels(index)) for index in range(count))
    options["num_files"] = num_files
    data.write_tfrecords(folder, split, examples, CLASSES, **options)
    return f"tfrecord:{folder}"


def write_records(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def record(**features):
    """A record of lists of bytes, and of an integer."""
    features = {
        name.replace("_", "/"): {"int64_list": {"value": [value]}}
        if isinstance(value, int)
        else {"bytes_list": {"value": value}}
        for name, value in features.items()
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def read(source, split="train", **options):
    """Numbers of the examples and their labels, a batch each."""
    dataset = data.load(
        source, split, **{"image_shape": SHAPE, "shuffle": False, **options}
    )
    if options.get("repeat"):
        dataset = dataset.take(12)
    return [(levels(x), y.tolist()) for x, y in dataset.as_numpy_iterator()]


def read_all(source, **options):
    with data.reading_errors():
        return read(source, **options)


def flat(batches):
    return [number for images, _ in batches for number in images]


def test_written_files_are_read(tmp_path):
    source = write(tmp_path)
    write(tmp_path, 5, 1, split="test")
    assert data.num_classes(source) == 4
    assert data.num_examples(source, "train") == 23
    ((images, labels),) = read(source, batch_size=23)
    # Dealt out to three files in turn.
    assert images == [n for file in range(3) for n in range(file, 23, 3)]
    assert labels == [n % 4 for n in images]
    assert flat(read(source, "test")) == [0, 1, 2, 3, 4]
    assert flat(read(f"tfrecord:{tmp_path}/*-of-00001*", "test")) == [0, 1, 2, 3, 4]
    # Without counts, the records are counted.
    settings = json.loads((tmp_path / "dataset.json").read_text())
    assert settings.pop("counts")["train-00001-of-00003.tfrecord"] == 8
    # The names of the features are the usual ones.
    del settings["features"]
    (tmp_path / "dataset.json").write_text(json.dumps(settings))
    assert data.num_examples(source, "train") == 23
    shuffled = flat(read(source, shuffle=True))
    assert sorted(shuffled) == list(range(23))
    assert shuffled != sorted(shuffled)


def test_files_of_others(tmp_path):
    path = tmp_path / "photos-val.rec"
    write_records(path, [record(jpg=[png(n)], cls=n) for n in range(1, 4)])
    source = f"tfrecord:{tmp_path}/*.rec"

    def describe(**settings):
        (tmp_path / "dataset.json").write_text(json.dumps(settings))

    names = {"image": "jpg", "label": "cls"}
    describe(classes=3, features=names, first_label=1)
    assert read(source, "val") == [([1, 2, 3], [0, 1, 2])]
    describe(classes=5, features=names, first_label=-1)
    assert read(source, "val") == [([1, 2, 3], [2, 3, 4])]
    describe(classes=3, features=names)
    message = r"labels of 3 classes in .*photos-val\.rec, record 2; received: 3"
    with pytest.raises(ValueError, match=message), data.reading_errors():
        read(source, "val")
    describe(classes=3)
    write_records(path, [b"no example"])
    refuses(r"records of tf.train.Example in .*val\.rec", read, source, "val")


def test_a_failed_write_leaves_what_was_there(tmp_path):
    source = write(tmp_path)
    before = sorted(tmp_path.iterdir())

    def broken():
        yield picture(0), 1
        yield picture(1), 9

    with pytest.raises(ValueError, match="received: 9 of example 1"):
        data.write_tfrecords(tmp_path, "train", broken(), CLASSES)
    assert sorted(tmp_path.iterdir()) == before
    assert len(flat(read(source))) == 23
    # A write that succeeds replaces all files of the split.
    write(tmp_path, 4, 2)
    assert sorted(flat(read(source))) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"Expected the classes of .*dataset\.json"):
        data.write_tfrecords(tmp_path, "test", [(picture(0), 0)], ["a", "b"])
    with pytest.raises(ValueError, match="Expected the classes"):
        data.write_tfrecords(tmp_path, "test", [(picture(0), "a zero")])


def test_corrupt_files_are_named(tmp_path):
    source = write(tmp_path)
    path = tmp_path / "train-00001-of-00003.tfrecord"
    (tmp_path / "dataset.json").write_text(json.dumps({"classes": CLASSES}))
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    refuses(r"whole records.*train-00001.*record 7", read, source)
    path.write_bytes(content[:100] + b"x" + content[101:])
    with pytest.raises(tf.errors.InvalidArgumentError, match=path.name):
        read(source)
    refuses(f"none of them corrupt.*{path}$", read_all, source)


def test_a_record_without_an_image_is_named(tmp_path):
    source = write(tmp_path)
    path = tmp_path / "train-00002-of-00003.tfrecord"
    records = [x.numpy() for x in tf.data.TFRecordDataset(str(path))]
    broken = png(5)[:-20] + b"0" * 20
    for new, message, augment in (
        (b"no example", "Expected a tf.train.Example with .*received: ", None),
        # This decodes a part of an image.
        (
            records[1].replace(png(5), broken),
            "Expected an image that can",
            "random_resized_crop",
        ),
    ):
        write_records(path, [records[0], new, *records[2:]])
        refuses(f"{message}.*{path}, record 1$", read_all, source, augment=augment)
        # The files one after the other, of which two have 8.
        assert data.find_unreadable(source, "train").tolist() == [17]
        with pytest.warns(UserWarning, match=f"1 of 23 images.*{path}, record 1$"):
            actual = flat(read(source, unreadable="exclude"))
        assert sorted(actual) == [n for n in range(23) if n != 5]
        # The number in the file is that of the file, whatever is left out before it.
        refuses(f"{path}, record 1$", read_all, source, exclude=[0, 9, 16])


def test_several_labels(tmp_path):
    source = write(tmp_path, 7, 1, lambda index: SEVERAL[index])
    refuses("Expected multi_label=True", read, source)
    ((_, sparse),) = read(source, multi_label=True)
    assert sparse == [[*sorted(labels), -1, -1][:2] for labels in SEVERAL]
    ((_, sparse),) = read(source, multi_label=True, max_labels=4)
    assert sparse[1] == [2, 3, -1, -1]
    ((_, dense),) = read(source, multi_label=True, one_hot=True)
    assert [np.flatnonzero(row).tolist() for row in dense] == [*map(sorted, SEVERAL)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="most max_labels=1"):
        read(source, multi_label=True, max_labels=1)
    # Mixing needs vectors, and makes them.
    ((_, mixed),) = read(source, multi_label=True, augment="mixup")
    assert np.shape(mixed) == (7, 4)
    assert 0 < np.max(mixed) <= 1


def test_folders_with_several_labels(tmp_path):
    for split, count in (("train", 7), ("test", 2)):
        listed = {}
        for index in range(count):
            name = f"images/{index}.png"
            save(tmp_path / split / name, index)
            listed[name] = [CLASSES[label] for label in SEVERAL[index]]
        (tmp_path / split / "labels.json").write_text(json.dumps(listed))
    source = f"folder:{tmp_path}"
    # Nothing is only an animal.
    assert data.num_classes(source) == 3
    ((images, labels),) = read(source, multi_label=True)
    assert images == list(range(7))
    assert labels == [
        [*sorted(label - 1 for label in labels), -1, -1][:2] for labels in SEVERAL
    ]
    ((_, labels),) = read(source, "test", multi_label=True)
    assert labels == [[0, -1], [1, 2]]
    (tmp_path / "test" / "labels.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"test/labels\.json"):
        read(source, multi_label=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same 23 images in TFRecord files and in a folder."""
    folder = tmp_path_factory.mktemp("images")
    records = write(folder / "records")
    for index in range(23):
        save(folder / "files" / "train" / CLASSES[index % 4] / f"{index}.png", index)
    return {"tfrecord": records, "folder": f"folder:{folder / 'files'}"}


@pytest.mark.parametrize("kind", ["tfrecord", "folder"])
def test_shards(sources, kind):
    source = sources[kind]
    # A pass in order: disjoint, complete, equally many batches.
    parts = [read(source, batch_size=6, shard=(i, 2)) for i in range(2)]
    assert [len(part) for part in parts] == [4, 4]
    assert sorted(n for part in parts for n in flat(part)) == list(range(23))
    options = {"batch_size": 6, "shuffle": True, "seed": 3}
    options["drop_remainder"] = True
    if kind == "folder":
        parts = [read(source, **options, shard=(i, 2)) for i in range(2)]
        assert [[len(x) for x, _ in part] for part in parts] == [[3, 3, 3]] * 2
        seen = [n for part in parts for n in flat(part)]
        assert len(set(seen)) == 18
    # And passes without end, from the middle.
    options["repeat"] = True
    whole = [read(source, **options, shard=(i, 2)) for i in range(2)]
    # Whatever the program's own seed.
    tf.random.set_seed(3)
    later = [read(source, **options, shard=(i, 2), start_batch=4) for i in range(2)]
    for part, rest in zip(whole, later):
        assert part[4:] == rest[:8]
    epoch = [n for part in whole for n in flat(part[:3])]
    assert len(set(epoch)) == 18
    if kind == "folder":
        # Batches are those of one host.
        together = [flat(step) for step in zip(*whole)]
        assert together == [images for images, _ in read(source, **options)]


@pytest.mark.parametrize("kind", ["tfrecord", "folder"])
def test_excluded_examples_do_not_come(sources, kind, tmp_path):
    source = sources[kind]
    order = flat(read(source))
    indices = [0, 5, 6, 7, 8, 9, 22, 5]
    kept = [n for i, n in enumerate(order) if i not in indices]
    assert flat(read(source, exclude=indices)) == kept
    assert data.num_examples(source, "train", exclude=indices) == 16
    options = {"shuffle": True, "batch_size": 4, "exclude": indices}
    parts = [read(source, **options, shard=(i, 2)) for i in range(2)]
    assert sorted(n for part in parts for n in flat(part)) == sorted(kept)
    path = tmp_path / "duplicates.json"
    content = {"split": "train", "count": 23, "indices": indices}
    path.write_text(json.dumps(content))
    assert flat(read(source, exclude=path)) == kept
    path.write_text(json.dumps({**content, "count": 24}))
    refuses("received: split='train', count=24", read, source, exclude=path)


def captions_of(number):
    return [f"{number} {letter}" for letter in "abc"[: 1 + number % 3]]


@pytest.fixture
def source(tmp_path):
    pairs = [(png(i), captions_of(i)) for i in range(11)]
    data.write_tfrecords(tmp_path, "train", pairs, num_files=2)
    return f"tfrecord:{tmp_path}"


def test_captions_are_read_back(source):
    flat = {(i, text) for i in range(11) for text in captions_of(i)}
    (batch,) = rows(data.load_pairs(source, "train", SHAPE))
    assert sorted(row[0] for row in batch) == list(range(11))
    assert {row[:2] for row in batch} <= flat
    texts = sorted(text for _, text in flat)
    assert sorted(data.load_captions(source, "train")) == texts
    (batch,) = rows(data.load_pairs(source, "train", SHAPE, captions="all"))
    assert len(batch) == data.num_pairs(source, "train", captions="all") == len(flat)
    assert {row[:2] for row in batch} == flat
    # Ids are equal for the captions of one image alone.
    assert len({(r[0], r[2]) for r in batch}) == 11
    assert {row[2] for row in batch} == {*range(11)}
    assert len({row[3] for row in batch}) == len(flat)
    options = {"captions": "first", "shuffle": False}
    (first,) = rows(data.load_pairs(source, "train", SHAPE, **options))
    order = [*range(0, 11, 2), *range(1, 11, 2)]
    assert [row[1] for row in first] == [captions_of(i)[0] for i in order]


@pytest.mark.parametrize("choice", ["random", "all"])
def test_resumption_and_shards_of_captions(source, choice):
    def batches(take, **options):
        options |= {"batch_size": 4, "repeat": True, "captions": choice}
        return rows(data.load_pairs(source, "train", SHAPE, **options), take)

    if choice == "all":
        # Pairs by offsets are rows of common batches.
        check_resumption(batches)
        return
    whole = batches(7)
    assert batches(2, start_batch=5) == whole[5:]
    # Record files are read in parts.
    parts = [batches(2, shard=(i, 2)) for i in range(2)]
    assert len({row[0] for part in parts for batch in part for row in batch}) == 8


def test_faults(tmp_path):
    def example(image, captions):
        return record(image_encoded=[image], image_captions=captions)

    path = tmp_path / "train.tfrecord"
    good = [example(png(i), [b"a cat"]) for i in range(3)]
    bad = [example(png(9), x) for x in ([], [b"fine", b" "], [b"caf\xe9"])]
    bad.append(example(b"no picture", [b"a dog"]))
    source = f"tfrecord:{path}"

    for number, fault in enumerate(bad):
        write_records(path, [good[0], fault])
        choice = ("random", "all")[number % 2]
        dataset = data.load_pairs(source, "train", SHAPE, captions=choice)
        refuses(r"Expected.*train\.tfrecord", rows, dataset)
    write_records(path, [good[0], *bad, *good[1:]])
    options = {"captions": "all", "shuffle": False, "unreadable": "exclude"}
    with pytest.warns(UserWarning, match="4 of 7 images"):
        dataset = data.load_pairs(source, "train", SHAPE, **options)
    assert [row[0] for row in rows(dataset)[0]] == [0, 1, 2]
    refuses("captions in UTF-8", data.load_captions, source, "train")
    # The image of the last one alone is of no use.
    captions = data.load_captions(source, "train", unreadable="exclude")
    assert captions == ("a cat", "a dog", "a cat", "a cat")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    refuses(r"whole records.*train\.tfrecord", data.load_pairs, source, "train")


def test_records_have_texts(tmp_path):
    path = tmp_path / "train-00000.tfrecord"
    write_records(path, [record(story=[x.encode()]) for x in ("one", "zwei ü")])
    settings = {"features": {"text": "story"}}
    (tmp_path / "dataset.json").write_text(json.dumps(settings))
    assert data.load_texts(f"tfrecord:{tmp_path}", "train") == ("one", "zwei ü")
