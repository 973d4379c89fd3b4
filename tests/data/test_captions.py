"""Pairs of images and captions: order, choice, ids, mixtures, names of classes."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.data import load_captions, load_pairs, num_pairs, write_tfrecords
from keras_moe.data._captions import batch_sizes
from tests.pipelines import SHAPE as COLOUR
from tests.pipelines import check_resumption, png, rows
from tests.refusals import refuses

tf = pytest.importorskip("tensorflow")


SHAPE = (4, 4, 1)


def make_pairs(count, seed=0):
    """Images whose pixels all have the number of the image, and 1 to 3 captions."""
    images = np.zeros((count, *SHAPE), "uint8") + np.arange(count)[:, None, None, None]
    rng = np.random.default_rng(seed)
    captions = [
        [f"{i} {'abc'[k]}" for k in range(rng.integers(1, 4))] for i in range(count)
    ]
    return images.astype("uint8"), captions


def test_pairs_belong_together():
    pairs = make_pairs(13)
    dataset = load_pairs(pairs, "train", SHAPE, 5)
    inputs, ids = dataset.element_spec
    assert inputs["images"].shape.as_list() == [None, *SHAPE]
    assert (inputs["images"].dtype, ids["text_ids"].dtype) == (tf.float32, tf.int32)
    batches = rows(dataset)
    assert [len(batch) for batch in batches] == [5, 5, 3]
    every = list(chain(*batches))
    assert sorted(row[0] for row in every) == list(range(13))
    assert [row[0] for row in every] != list(range(13))
    for image, caption, image_id, _ in every:
        assert caption in pairs[1][image]
        assert image_id == image
    # Each pass draws other captions in another order.
    assert rows(dataset) != batches
    assert rows(load_pairs(pairs, "train", SHAPE, 5)) == batches


def test_choices_of_captions():
    pairs = make_pairs(13)
    flat = [text for several in pairs[1] for text in several]
    first = rows(load_pairs(pairs, "test", SHAPE, 13, captions="first"))[0]
    assert [row[1] for row in first] == [several[0] for several in pairs[1]]
    options = {"captions": "all", "repeat": True}
    assert num_pairs(pairs, "train", captions="all") == len(flat)
    assert num_pairs(pairs, "train") == 13
    assert load_captions(pairs, "train") == tuple(flat)
    every = rows(load_pairs(pairs, "train", SHAPE, len(flat), **options), 2)
    for one_pass in every:
        assert sorted(row[1] for row in one_pass) == sorted(flat)
        assert all(int(row[1].split()[0]) == row[0] == row[2] for row in one_pass)
    assert every[0] != every[1]
    # Every caption of an image is drawn in some pass.
    drawn = chain(*rows(load_pairs(pairs, "train", SHAPE, 13, repeat=True), 30))
    assert {row[1] for row in drawn} == {*flat}


def test_ids_are_equal_for_equal_captions():
    images, _ = make_pairs(4)
    assert load_captions((images[:1], "a cat"), "test") == ("a cat",)
    captions = ["a cat", ["a dog", "a cat"], "a bird", "a dog"]
    options = {"captions": "all", "shuffle": False}
    every = rows(load_pairs((images, captions), "test", SHAPE, **options))[0]
    assert [row[2] for row in every] == [0, 1, 1, 2, 3]
    assert [row[3] for row in every] == [0, 1, 0, 2, 1]


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_resumed_batches_and_shards(data):
    count = data.draw(st.integers(1, 30))
    shards = data.draw(st.integers(1, 3))
    choice = data.draw(st.sampled_from(["random", "all", "first"]))
    pairs = make_pairs(count, seed=count)
    most = num_pairs(pairs, "train", captions=choice)
    batch = shards * data.draw(st.integers(1, max(most // shards, 1)))
    if batch > most:
        return
    start = data.draw(st.integers(0, 9))
    options = {"captions": choice, "repeat": True, "seed": count}

    def batches(take, **more):
        return rows(load_pairs(pairs, "train", SHAPE, batch, **options, **more), take)

    whole = check_resumption(batches, start + 2, (start,), shards)
    if choice == "all":
        per_pass = most // batch
        once = [row[1] for some in whole[:per_pass] for row in some]
        assert len({*once}) == len(once)


def test_a_tokenizer_gets_batches():
    pairs = make_pairs(7)

    def tokenizer(captions):
        ids = tf.strings.to_number(tf.strings.substr(captions, 0, 1), "int32")
        token_ids = tf.stack([ids, ids + 1], axis=1)
        return {"token_ids": token_ids, "padding_mask": token_ids > 0}

    dataset = load_pairs(pairs, "test", SHAPE, 4, tokenizer=tokenizer)
    inputs, ids = next(dataset.as_numpy_iterator())
    assert set(inputs) == {"images", "token_ids", "padding_mask"}
    assert inputs["token_ids"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert ids["image_ids"].tolist() == [0, 1, 2, 3]


def test_augmentation_of_images_alone():
    pairs = make_pairs(6)
    plain = {"captions": "first", "repeat": True}

    def brighter(images, seed):
        return images + tf.cast(tf.random.stateless_uniform([], seed, 1, 9), "float32")

    options = {**plain, "augment": brighter}
    changed = rows(load_pairs(pairs, "train", SHAPE, 6, **options), 4)
    same = rows(load_pairs(pairs, "train", SHAPE, 6, **plain), 4)
    for some, others in zip(changed, same):
        assert [row[1:] for row in some] == [row[1:] for row in others]
    assert [row[0] for row in changed[0]] != [row[0] for row in same[0]]
    resumed = load_pairs(pairs, "train", SHAPE, 6, start_batch=3, **options)
    assert rows(resumed, 1) == changed[3:]


def test_excluded_images_leave_with_all_captions():
    pairs = make_pairs(9)
    options = {"captions": "all", "exclude": [0, 4]}
    every = rows(load_pairs(pairs, "train", SHAPE, 64, **options))[0]
    kept = [i for i in range(9) if i not in (0, 4)]
    texts = [text for i in kept for text in pairs[1][i]]
    assert sorted(row[1] for row in every) == sorted(texts)
    some = rows(load_pairs(pairs, "test", SHAPE, 64, exclude=[0, 4]))[0]
    assert [row[0] for row in some] == kept


@pytest.mark.parametrize(("bad", "message"), [
    (None, "image 2 has no caption"),
    (b"caf\xe9", "image 2 has a caption that is not text in UTF-8"),
    (float("nan"), "image 2 has a caption that is not text in UTF-8: nan"),
])  # fmt: skip
def test_captions_of_no_use(bad, message):
    images, captions = make_pairs(5)
    captions[2] = bad
    pairs = (images, captions)
    with pytest.raises(ValueError, match=f"received: 1 of 5 images .*{message}"):
        load_pairs(pairs, "train", SHAPE, 2)
    refuses(message, load_captions, pairs, "train")
    with pytest.warns(UserWarning, match=f"1 of 5 images.*{message}"):
        dataset = load_pairs(pairs, "test", SHAPE, 8, unreadable="exclude")
    assert [row[0] for row in rows(dataset)[0]] == [0, 1, 3, 4]
    # Nothing is wrong with what is left out.
    assert num_pairs(pairs, "test", exclude=[2]) == 4


@pytest.fixture
def sources(tmp_path):
    names = []
    for name, numbers in (("a", range(10)), ("b", range(100, 107))):
        pairs = [(png(i), [f"{i}", f"{i} again"]) for i in numbers]
        write_tfrecords(tmp_path / name, "train", pairs)
        names.append(f"tfrecord:{tmp_path / name}")
    return names


def test_ratio_order_and_resumption(sources):
    first, second = sources
    mixture = {first: 3, second: 1}

    def batches(take, source=mixture, size=8, **options):
        options = {"repeat": True, **options}
        dataset = load_pairs(source, "train", COLOUR, size, **options)
        return rows(dataset, take)

    whole = batches(4)
    for batch in whole:
        assert [row[0] >= 100 for row in batch] == [False] * 6 + [True] * 2
        # Image 3 of one source is not image 3 of the other.
        assert len({row[2] for row in batch}) == len({row[0] for row in batch})
        assert all(row[1].split()[0] == str(row[0]) for row in batch)
    assert batches(1, start_batch=3) == whole[3:]
    # Each source has its own order: alone, with its own seed, it has the same rows.
    for batch, alone in zip(whole, batches(4, second, 2, seed=1), strict=True):
        assert [row[:2] for row in batch[6:]] == [row[:2] for row in alone]
    # A host has its rows of each source; record files are read in parts.
    (part,) = batches(1, shard=(1, 2))
    assert [row[0] >= 100 for row in part] == [False] * 3 + [True]
    assert num_pairs(mixture, "train") == 17
    assert len(load_captions(mixture, "train")) == 34
    assert num_pairs(mixture, "train", exclude={second: [0]}) == 16
    # Classes, by their names, may be one of the sources.
    (batch,) = batches(1, {"digits": 0.5, first: 0.5}, 4, templates="the digit {}")
    assert [row[1].startswith("the digit") for row in batch] == [True] * 2 + [False] * 2


def test_weights():
    assert batch_sizes({"a": 3, "b": 1}, 16_384, 8) == {"a": 12_288, "b": 4_096}
    actual = batch_sizes({"a": 0.7, "b": 0.2, "c": 0.1}, 20, 2)
    assert actual == {"a": 14, "b": 4, "c": 2}
    # Largest remainders, the first of equal ones, alike on each host.
    assert batch_sizes({"a": 1, "b": 3}, 21_502, 1) == {"a": 5376, "b": 16_126}
    assert batch_sizes({"a": 1, "b": 1, "c": 1.5}, 20, 2) == {"a": 6, "b": 6, "c": 8}
    assert batch_sizes({"a": 3, "b": 1}, 12, 2) == {"a": 10, "b": 2}
    assert batch_sizes({"a": np.float32(3), "b": 1}, 4, 1) == {"a": 3, "b": 1}


def test_bad_mixtures(sources):
    mixture = {sources[0]: 3, sources[1]: 1}
    for exclude in ([0], np.array([0]), {"other": [0]}):
        with pytest.raises(ValueError, match=r"exclude as a dict of the sources"):
            num_pairs(mixture, "train", exclude=exclude)
    with pytest.raises(ValueError, match="source of classes alone"):
        load_pairs(mixture, "train", COLOUR, 8, repeat=True, templates="{}")


TEMPLATES = ["a photo of a {}.", "the digit {}"]


def test_digits_have_captions_by_templates(tmp_path):
    file = tmp_path / "templates.txt"
    file.write_text("\n".join(TEMPLATES) + "\n\n")
    options = {"templates": file, "batch_size": 150, "shuffle": False}
    dataset = load_pairs("digits", "test", (8, 8, 1), **options)
    first, *_ = rows(dataset)
    captions = {caption for _, caption, _, _ in first}
    expected = {t.replace("{}", str(c)) for t in TEMPLATES for c in range(10)}
    assert captions == expected
    # Ids are those of the captions, not of the classes.
    assert len({row[3] for row in first}) == 20
    assert [row[2] for row in first] == list(range(150))
    # Another pass draws other templates for the same images.
    again, *_ = rows(dataset)
    assert [row[1] for row in again] != [row[1] for row in first]
    options = {"templates": TEMPLATES, "captions": "all"}
    assert num_pairs("digits", "test", **options) == 900
    texts = load_captions("digits", "test", **options)
    assert texts[:2] == ("a photo of a 0.", "the digit 0")
    every = load_pairs("digits", "test", (8, 8, 1), 4, shuffle=False, **options)
    (four,) = rows(every, 1)
    assert [(row[1][:5], row[2]) for row in four] == [
        *(("a pho", 0), ("the d", 0), ("a pho", 1), ("the d", 1))
    ]
    # The bare name is the default.
    bare = rows(load_pairs("digits", "test", (8, 8, 1), 4), 1)[0]
    assert all(row[1] in "0123456789" for row in bare)


def test_classes_in_record_files(tmp_path):
    examples = [(png(i), i % 2) for i in range(6)]
    write_tfrecords(tmp_path, "train", examples, ["cat", "dog"])
    options = {"templates": "a {}", "shuffle": False}
    source = f"tfrecord:{tmp_path}"
    (batch,) = rows(load_pairs(source, "train", COLOUR, **options))
    expected = [(i, f"a {['cat', 'dog'][i % 2]}") for i in range(6)]
    assert [row[:2] for row in batch] == expected
    assert len({row[2] for row in batch}) == 6
