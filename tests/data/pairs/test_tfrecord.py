"""Pairs in record files."""

import json

import numpy as np
import pytest

from keras_moe.data import (
    load_captions,
    load_pairs,
    num_pairs,
    write_pair_tfrecords,
)

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free


def captions_of(number):
    return [f"{number} {letter}" for letter in "abc"[: 1 + number % 3]]


@pytest.fixture
def source(tmp_path, pair_tools):
    pairs = [(pair_tools.png(i), captions_of(i)) for i in range(11)]
    write_pair_tfrecords(tmp_path, "train", pairs, num_files=2)
    return f"tfrecord:{tmp_path}"


def test_captions_are_read_back(source, pair_tools):
    shape, rows = pair_tools.shape, pair_tools.rows
    flat = {(i, text) for i in range(11) for text in captions_of(i)}
    (batch,) = rows(load_pairs(source, "train", shape))
    assert sorted(row[0] for row in batch) == list(range(11))
    assert {row[:2] for row in batch} <= flat
    assert sorted(load_captions(source, "train")) == sorted(text for _, text in flat)
    every = load_pairs(source, "train", shape, captions="all")
    (batch,) = rows(every)
    assert len(batch) == num_pairs(source, "train", captions="all") == len(flat)
    assert {row[:2] for row in batch} == flat
    # Ids are equal for the captions of one image alone.
    assert len({(r[0], r[2]) for r in batch}) == 11
    assert {row[2] for row in batch} == {*range(11)}
    assert len({row[3] for row in batch}) == len(flat)
    first = rows(load_pairs(source, "train", shape, captions="first", shuffle=False))
    assert [row[1] for row in first[0]] == [
        captions_of(i)[0] for i in [*range(0, 11, 2), *range(1, 11, 2)]
    ]


@pytest.mark.parametrize("choice", ["random", "all"])
def test_resumption_and_shards(source, pair_tools, choice):
    def batches(take, **options):
        dataset = load_pairs(
            source,
            "train",
            pair_tools.shape,
            4,
            repeat=True,
            captions=choice,
            **options,
        )
        return pair_tools.rows(dataset, take)

    whole = batches(7)
    for start in (1, 5):
        assert batches(7 - start, start_batch=start) == whole[start:]
    # Record files are read in parts; pairs by offsets are rows of common batches.
    parts = [batches(2, shard=(i, 2)) for i in range(2)]
    seen = {row[:2] for part in parts for batch in part for row in batch}
    assert all(len(batch) == 2 for part in parts for batch in part)
    if choice == "all":
        assert seen == {row[:2] for batch in whole[:2] for row in batch}
    else:
        assert len({image for image, _ in seen}) == 8


def test_stored_tokens(tmp_path, pair_tools):
    def tokenizer(captions):
        ids = [[1 + int(text.split()[0]), ord(text[-1]), 0] for text in captions]
        ids = np.array(ids)
        return {
            "token_ids": ids,
            "padding_mask": np.array([[True, True, False]] * len(ids)),
        }

    pairs = [(pair_tools.png(i), captions_of(i)) for i in range(4)]
    write_pair_tfrecords(tmp_path, "test", pairs, tokenizer=tokenizer)
    source = f"tfrecord:{tmp_path}"
    dataset = load_pairs(source, "test", pair_tools.shape, captions="all")
    inputs, ids = next(dataset.as_numpy_iterator())
    expected = [[1 + i, ord(text[-1]), 0] for i in range(4) for text in captions_of(i)]
    assert inputs["token_ids"].tolist() == expected
    assert inputs["token_ids"].dtype == "int32"
    assert inputs["padding_mask"].tolist() == [[True, True, False]] * len(expected)
    assert len({*ids["text_ids"].tolist()}) == len(expected)
    with pytest.raises(ValueError, match="tokenizer=None with stored tokens"):
        load_pairs(source, "test", tokenizer=tokenizer)
    with pytest.raises(
        ValueError, match=r"^Expected captions as text; received: stored"
    ):
        load_captions(source, "test")
    # Another split cannot have text, and nothing of it is left.
    with pytest.raises(ValueError, match="the features and the length"):
        write_pair_tfrecords(tmp_path, "train", pairs)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["dataset.json", "test-00000-of-00001.tfrecord"]


def test_faults(tmp_path, pair_tools):
    def example(image, captions):
        lists = {"image/encoded": [image], "image/captions": captions}
        features = {
            name: tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
            for name, values in lists.items()
        }
        features = tf.train.Features(feature=features)
        return tf.train.Example(features=features).SerializeToString()

    path = tmp_path / "train.tfrecord"
    good = [example(pair_tools.png(i), [b"a cat"]) for i in range(3)]
    bad = [
        example(pair_tools.png(9), []),
        example(pair_tools.png(9), [b"fine", b" "]),
        example(pair_tools.png(9), [b"caf\xe9"]),
        example(b"no picture", [b"a dog"]),
    ]
    source = f"tfrecord:{path}"

    def write(records):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)

    for number, record in enumerate(bad):
        write([good[0], record])
        choice = ("random", "all")[number % 2]
        dataset = load_pairs(source, "train", pair_tools.shape, captions=choice)
        with pytest.raises(ValueError, match=r"Expected.*train\.tfrecord"):
            pair_tools.rows(dataset)
    write([good[0], *bad, *good[1:]])
    options = {"captions": "all", "shuffle": False, "unreadable": "exclude"}
    with pytest.warns(UserWarning, match="4 of 7 images"):
        dataset = load_pairs(source, "train", pair_tools.shape, **options)
    assert [row[0] for row in pair_tools.rows(dataset)[0]] == [0, 1, 2]
    with pytest.raises(ValueError, match="captions in UTF-8"):
        load_captions(source, "train")
    # The image of the last one alone is of no use.
    captions = load_captions(source, "train", unreadable="exclude")
    assert captions == ("a cat", "a dog", "a cat", "a cat")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with pytest.raises(ValueError, match=r"whole records.*train\.tfrecord"):
        load_pairs(source, "train")


def test_bad_arguments(tmp_path, pair_tools):
    image = pair_tools.png(0)
    flat = {"token_ids": [1], "padding_mask": [1]}
    for pairs, options, message in (
        ([(image, "")], {}, "pair 0 has an empty caption"),
        ([(image, "a"), (image, [])], {}, "pair 1 has no caption"),
        ([(image, b"\xff")], {}, "pair 0 has a caption that is not UTF-8"),
        ([], {}, "examples to write; received: none"),
        ([(image, "a")], {"num_files": 0}, "num_files=0"),
        (
            [(image, "a")],
            {"tokenizer": lambda _: flat},
            "rows of tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write_pair_tfrecords(tmp_path, "train", pairs, **options)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="letters and digits"):
        write_pair_tfrecords(tmp_path, "../train", [(image, "a")])
    write_pair_tfrecords(tmp_path, "train", [(image, "a")])
    sidecar = tmp_path / "dataset.json"
    content = json.loads(sidecar.read_text())
    for features, message in (
        ({"image": 7}, "dataset.json"),
        ({"image": "jpg"}, "'jpg'.*image/encoded"),
    ):
        sidecar.write_text(json.dumps({**content, "features": features}))
        with pytest.raises(ValueError, match=message):
            load_pairs(f"tfrecord:{tmp_path}", "train")
