"""Pairs in memory: their order, captions, ids, shards and resumption."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.data import PairOptions, load_captions, load_pairs, num_pairs

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free

SHAPE = (4, 4, 1)


def make_pairs(count, seed=0):
    """Images whose pixels all have the number of the image, and 1 to 3 captions."""
    images = np.zeros((count, *SHAPE), "uint8") + np.arange(count)[:, None, None, None]
    rng = np.random.default_rng(seed)
    captions = [
        [f"{i} {'abc'[k]}" for k in range(rng.integers(1, 4))] for i in range(count)
    ]
    return images.astype("uint8"), captions


def rows(dataset, take=None):
    """The (image, caption, image id, text id) of each pair, in batches."""
    batches = []
    for inputs, ids in dataset.take(-1 if take is None else take).as_numpy_iterator():
        pixels = np.round((inputs["images"][:, 0, 0, 0] + 1) * 127.5).astype(int)
        captions = [caption.decode() for caption in inputs["captions"]]
        image_ids, text_ids = ids["image_ids"].tolist(), ids["text_ids"].tolist()
        batches.append(list(zip(pixels.tolist(), captions, image_ids, text_ids)))
    return batches


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

    whole = batches(start + 2)
    assert batches(2, start_batch=start) == whole[start:]
    parts = [batches(start + 2, shard=(i, shards)) for i in range(shards)]
    assert [list(chain(*several)) for several in zip(*parts)] == whole
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
    assert [[row[1:] for row in some] for some in changed] == [
        [row[1:] for row in some] for some in same
    ]
    assert [row[0] for row in changed[0]] != [row[0] for row in same[0]]
    resumed = load_pairs(pairs, "train", SHAPE, 6, start_batch=3, **options)
    assert rows(resumed, 1) == changed[3:]
    with pytest.raises(ValueError, match=r"images alone.*received: augment='mixup'"):
        load_pairs(pairs, "train", SHAPE, 6, augment="mixup")


def test_excluded_images_leave_with_all_captions():
    pairs = make_pairs(9)
    options = {"captions": "all", "exclude": [0, 4]}
    every = rows(load_pairs(pairs, "train", SHAPE, 64, **options))[0]
    kept = [i for i in range(9) if i not in (0, 4)]
    assert sorted(row[1] for row in every) == sorted(
        text for i in kept for text in pairs[1][i]
    )
    some = rows(load_pairs(pairs, "test", SHAPE, 64, exclude=[0, 4]))[0]
    assert [row[0] for row in some] == kept


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "image 2 has no caption"),
        ([], "image 2 has no caption"),
        (" ", "image 2 has an empty caption"),
        (["a cat", ""], "image 2 has an empty caption"),
        (b"caf\xe9", "image 2 has a caption that is not UTF-8"),
        ("\ud83d", "image 2 has a caption that is not UTF-8"),
        (float("nan"), "image 2 has no string for a caption: nan"),
    ],
)
def test_captions_of_no_use(bad, message):
    images, captions = make_pairs(5)
    captions[2] = bad
    pairs = (images, captions)
    with pytest.raises(ValueError, match=f"received: 1 faults in 5 images: {message}"):
        load_pairs(pairs, "train", SHAPE, 2)
    with pytest.raises(ValueError, match=message):
        load_captions(pairs, "train")
    with pytest.warns(UserWarning, match=f"1 of 5 images.*{message}"):
        dataset = load_pairs(pairs, "test", SHAPE, 8, unreadable="exclude")
    assert [row[0] for row in rows(dataset)[0]] == [0, 1, 3, 4]
    # Nothing is wrong with what is left out.
    assert num_pairs(pairs, "test", exclude=[2]) == 4


def test_bad_input():
    images, captions = make_pairs(5)
    for source, message in (
        ((images[:3], captions), "3 images, 5 captions"),
        ((images.astype("float32"), captions), "dtype=float32"),
        ((images[0], captions), "shape=\\(4, 4, 1\\)"),
        (((images, [None] * 5)), "5 faults in 5 images"),
        ("flickr", "'emoji'.*received: source='flickr'"),
    ):
        with pytest.raises(ValueError, match=f"Expected.*{message}"):
            load_pairs(source, "train", SHAPE, 2)
    for options, message in (
        ({"start_batch": 3}, "repeat=True.*start_batch=3"),
        ({"captions": "one"}, "captions='one'"),
        ({"size": 0}, "size=0"),
        ({"caption": "all"}, "caption='all'.*nearest: captions"),
        ({"unreadable": "skip"}, "unreadable='skip'"),
        ({"shard": (2, 2)}, "shard=\\(2, 2\\)"),
        ({"repeat": True, "batch_size": 6}, "5 examples.*batch_size=6"),
        ({"exclude": [5]}, "indices of some of 5 examples"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pairs((images, captions), "train", SHAPE, **options)
    assert PairOptions().first_batch is None


@pytest.mark.parametrize("dtype", ["complex64", "float32", "int64"])
def test_images_of_other_numbers_are_refused(dtype):
    images, captions = make_pairs(2)
    with pytest.raises(ValueError, match=f"of uint8 .*dtype={dtype}"):
        load_pairs((images.astype(dtype), captions), "train", SHAPE)


@pytest.mark.parametrize("kind", ["folder", "tfrecord", "webdataset"])
def test_nul_in_a_path_is_named(kind):
    source = f"{kind}:a\0b"
    with pytest.raises(ValueError, match=f"received: source='{source}'"):
        load_pairs(source, "train", SHAPE)
