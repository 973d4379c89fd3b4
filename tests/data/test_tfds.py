"""Reads data sets that the tests write in the format of TensorFlow Datasets."""

import re

import keras
import numpy as np
import pytest

from keras_moe import data
from tests.pipelines import arrays, rows
from tests.refusals import refuses

tfds = pytest.importorskip("tensorflow_datasets")
tf = pytest.importorskip("tensorflow")


LABELS = ["ant", "bee", "cat", "dog"]
COUNTS = {"train": 30, "test": 9}


def example(index):
    """An image of its own size and content, and the number of its class."""
    rng = np.random.default_rng(index)
    size = (6 + index % 5, 8, 3)
    return rng.integers(0, 256, size, dtype="uint8"), index % len(LABELS)


def make_builder(
    name, data_dir, features, encode, keys=None, splits=COUNTS, version="1.0.0"
):
    """Writes a data set below data_dir: no code of it is needed to read it."""

    class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        pkg_dir_path = data_dir
        # A notebook has no file of code beside which checksums could lie.
        __module__ = "notebook"

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=keys,
            )

        def _split_generators(self, dl_manager):
            offset = {"train": 0, "test": 1000, "validation": 2000}
            return {x: self._generate(offset[x], splits[x]) for x in splits}

        def _generate(self, offset, count):
            for index in range(offset, offset + count):
                yield index, encode(index)

        def _generate_examples(self):
            raise NotImplementedError

    Written.name = name
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    Written(data_dir=str(data_dir)).download_and_prepare(download_config=config)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    shape = (None, None, 3)
    features = {
        "image": tfds.features.Image(shape=shape, encoding_format="png"),
        "label": tfds.features.ClassLabel(names=LABELS),
        "id": np.int64,
    }

    def encode(index):
        image, label = example(index)
        return {"image": image, "label": label, "id": index}

    make_builder("insects", folder, features, encode)
    return str(folder)


def resized(index, size):
    pixels = example(index)[0].astype("float32")
    image = keras.ops.image.resize(pixels, size, data_format="channels_last")
    return keras.ops.convert_to_numpy(image) / 127.5 - 1


def contents(images):
    return sorted(image.tobytes() for image in images)


def test_images_and_labels(data_dir):
    images, labels = arrays(
        data.load("tfds:insects", "test", (7, 8, 3), data_dir=data_dir)
    )
    assert images.shape == (9, 7, 8, 3)
    assert images.dtype == "float32"
    assert labels.dtype == "int32"
    # The writer shuffles, so compare as sets.
    expected = [(resized(1000 + i, (7, 8)), i % 4) for i in range(9)]
    for image, label in zip(images, labels):
        near = [np.allclose(image, e, atol=1e-4) and label == c for e, c in expected]
        assert sum(near) == 1


def test_splits_their_sums_and_unknown_names(data_dir):
    def read(split):
        options = {"shuffle": False, "data_dir": data_dir}
        return arrays(data.load("tfds:insects", split, (6, 6, 3), **options))[0]

    first, last = read("train[:90%]"), read("train[90%:]")
    assert (len(first), len(last)) == (27, 3)
    assert contents([*first, *last]) == contents(read("train"))
    assert len(read("train[2:4]")) == 2
    assert len(read("test+train")) == 39
    assert data.num_classes("tfds:insects", data_dir=data_dir) == 4
    # Known without the data.
    assert data.num_classes("tfds:imagenet2012", data_dir=data_dir) == 1000
    with pytest.raises(ValueError, match=r"'tfds:ciffar10' .nearest: \['cifar10'"):
        data.num_classes("tfds:ciffar10", data_dir=data_dir)
    with pytest.raises(ValueError, match=r"'tfds:mnist:9\.9\.9' .*only: 3\."):
        data.num_classes("tfds:mnist:9.9.9", data_dir=data_dir)
    for split in ("validation", "train[:x]"):
        refuses(re.escape(split), data.load, "tfds:insects", split, data_dir=data_dir)


def test_colours_become_grey(data_dir):
    def read(channels):
        dataset = data.load("tfds:insects", "test", (6, 6, channels), data_dir=data_dir)
        return arrays(dataset)[0]

    luminance = read(3) @ np.array([[0.2989], [0.587], [0.114]])
    np.testing.assert_allclose(read(1), luminance, atol=1e-3)
    refuses("2 channels for images with 3", read, 2)


IMAGE, PIXELS = tfds.features.Image(shape=(4, 4, 3)), np.zeros((4, 4, 3), "uint8")
CLASS = tfds.features.ClassLabel(num_classes=3)
WITH_ALPHA = tfds.features.Image(shape=(4, 4, 4))


@pytest.mark.parametrize(("name", "features"), [
    ("no_label", {"image": (IMAGE, PIXELS)}),
    ("alpha", {"image": (WITH_ALPHA, PIXELS[..., [0] * 4]), "label": (CLASS, 1)}),
])  # fmt: skip
def test_other_tasks_are_refused(tmp_path, name, features):
    kinds, values = ({x: pair[i] for x, pair in features.items()} for i in (0, 1))
    make_builder(name, tmp_path, kinds, lambda _: values, None, {"train": 2})
    message = rf"tfds:{name} to have an image .*received: fe"
    refuses(message, data.load, f"tfds:{name}", "train", data_dir=str(tmp_path))
    refuses(message, data.num_classes, f"tfds:{name}", data_dir=str(tmp_path))


def test_supervised_keys_name_the_features(tmp_path):
    make_builder(
        *("other_names", tmp_path, {"photo": IMAGE, "kind": CLASS}),
        lambda index: {"photo": PIXELS + np.uint8(9), "kind": index % 3},
        keys=("photo", "kind"),
        splits={"test": 3},
    )
    dataset = data.load("tfds:other_names", "test", (4, 4, 3), data_dir=str(tmp_path))
    images, labels = arrays(dataset)
    np.testing.assert_allclose(images, 9 / 127.5 - 1, atol=1e-6)
    assert sorted(labels) == [0, 1, 2]


def test_several_labels(tmp_path):
    several = [[0, 2], [], [1]]
    features = {"image": IMAGE, "labels": tfds.features.Sequence(CLASS)}

    def encode(index):
        return {"image": PIXELS + np.uint8(index), "labels": several[index]}

    make_builder("many_labels", tmp_path, features, encode, splits={"train": 3})
    source, folder = "tfds:many_labels", str(tmp_path)
    assert data.num_classes(source, folder) == 3

    def read(**options):
        options |= {"data_dir": folder, "multi_label": True}
        images, labels = arrays(data.load(source, "train", (4, 4, 3), **options))
        order = np.argsort(images[:, 0, 0, 0])
        return labels[order].tolist()

    assert read(max_labels=2) == [[0, 2], [-1, -1], [1, -1]]
    assert read(one_hot=True) == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    refuses(r"Expected max_labels.*max_labels=None", read)
    with pytest.raises(ValueError, match="multi_label=True with 'tfds:many_labels'"):
        data.load(source, "train", data_dir=folder)


@pytest.fixture(scope="module")
def celeb_a(tmp_path_factory):
    """CelebA without its images, and the names of its attributes."""
    folder = tmp_path_factory.mktemp("celeb_a")
    info = tfds.builder("celeb_a").info
    features = dict(info.features.items())
    names = list(features["attributes"])

    def encode(index):
        index %= 1000
        return {
            "image": np.full((218, 178, 3), 20 * index, "uint8"),
            "landmarks": dict.fromkeys(features["landmarks"], index),
            "attributes": {x: (index + i) % 13 == 0 for i, x in enumerate(names)},
            "identity": dict.fromkeys(features["identity"], index),
        }

    counts = {"train": 12, "validation": 4, "test": 6}
    version = str(info.version)
    make_builder("celeb_a", folder, features, encode, None, counts, version)
    return str(folder), names


def test_attributes_are_several_labels(celeb_a):
    folder, names = celeb_a
    assert data.num_classes("tfds:celeb_a", folder) == 40
    # Known without the data, too, and in CelebA's order.
    assert data.num_classes("tfds:celeb_a") == 40
    assert (names[9], names[20], names[39]) == ("Blond_Hair", "Male", "Young")
    options = {"data_dir": folder, "multi_label": True, "shuffle": False}
    dataset = data.load("tfds:celeb_a", "test", (8, 8, 3), one_hot=True, **options)
    images, labels = arrays(dataset)
    assert labels.shape == (6, 40)
    for image, label in zip(images, labels):
        index = round((image.mean() + 1) * 127.5 / 20)
        expected = [(index + place) % 13 == 0 for place in range(40)]
        np.testing.assert_array_equal(label, expected)
    _, numbers = arrays(data.load("tfds:celeb_a", "test", (8, 8, 3), **options))
    for row, label in zip(numbers, labels, strict=True):
        assert row[row >= 0].tolist() == np.flatnonzero(label).tolist()


def test_a_download_asks_once_whether_there_is_a_network(monkeypatch, tmp_path):
    # Where a test has a network, it must not be asked.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"Expected tfds:mnist in .* or to reach http"):
        data.load("tfds:mnist", "train", data_dir=str(tmp_path))


JPEG = {"shape": (None, None, 3), "encoding_format": "jpeg"}
SPLITS = {"train": 6, "test": 5}


def captions_of(index, count):
    return [f"{index % 1000} {letter}" for letter in "abcdefg"[:count]]


def pixels(index):
    # The grey level is the number of the image, also after JPEG.
    return np.full((4, 6, 3), index % 1000, "uint8")


@pytest.fixture(scope="module")
def captions_dir(tmp_path_factory):
    """Captions as those of COCO, of Flickr30k and of LAION."""
    folder = tmp_path_factory.mktemp("tfds_pairs")
    box = tfds.features.BBox(0.0, 0.0, 0.5, 0.5)
    image, text = tfds.features.Image(**JPEG), tfds.features.Text()
    coco = {
        "image": image,
        "objects": tfds.features.Sequence({"bbox": tfds.features.BBoxFeature()}),
        "captions": tfds.features.Sequence({"id": np.int64, "text": tf.string}),
    }

    def coco_example(index):
        texts = captions_of(index, 5 + index % 1000 % 3)
        return {
            "image": pixels(index),
            "objects": [{"bbox": box}] * (index % 2),
            "captions": [{"text": x, "id": i} for i, x in enumerate(texts)],
        }

    def flickr_example(index):
        return {"image": pixels(index), "captions": captions_of(index, 5)}

    def laion_example(index):
        return {"image": pixels(index), "caption": f"{index % 1000} a"}

    flickr = {"image": image, "captions": tfds.features.Sequence(text)}
    for name, features, encode in (
        ("coco_like", coco, coco_example),
        ("flickr30k", flickr, flickr_example),
        ("laion", {"image": image, "caption": text}, laion_example),
    ):
        make_builder(name, folder, features, encode, None, SPLITS)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "count"), [("coco_like", 5 + 6 + 7 + 5 + 6), ("flickr30k", 25)]
)
def test_captions_of_images(captions_dir, name, count):
    source, shape = f"tfds:{name}", (4, 6, 3)
    options = {"data_dir": captions_dir}
    (batch,) = rows(data.load_pairs(source, "test", shape, **options))
    # The writer shuffles: each image is among them with its own captions.
    assert sorted(row[0] for row in batch) == list(range(5))
    assert all(int(row[1].split()[0]) == row[0] for row in batch)
    options["captions"] = "all"
    (every,) = rows(data.load_pairs(source, "test", shape, **options))
    assert len({row[:2] for row in every}) == len(every) == count
    assert all(int(row[1].split()[0]) == row[0] for row in every)
    assert len({row[2] for row in every}) == 5
    assert data.num_pairs(source, "test", **options) == count
    captions = data.load_captions(source, "test", **options)
    assert captions == tuple(row[1] for row in every)


def test_order_of_captions_goes_on(captions_dir):
    def batches(take, **options):
        options = {"data_dir": captions_dir, "repeat": True, "seed": 3, **options}
        dataset = data.load_pairs("tfds:coco_like", "train", (4, 6, 3), 4, **options)
        return rows(dataset, take)

    whole = batches(3)
    assert batches(1, start_batch=2) == whole[2:]
    # One caption alone is a text of its own.
    captions = data.load_captions("tfds:laion", "test", data_dir=captions_dir)
    assert sorted(captions) == [f"{i} a" for i in range(5)]
    # A slice of the split has other records.
    assert data.num_pairs("tfds:flickr30k", "train[2:5]", data_dir=captions_dir) == 3
    every = {"captions": "all", "data_dir": captions_dir}
    assert data.num_pairs("tfds:flickr30k", "train[2:5]", **every) == 15
    dataset = data.load_pairs("tfds:flickr30k", "train[2:5]", (4, 6, 3), **every)
    images = [row[0] for row in rows(dataset)[0]]
    assert sorted(images.count(image) for image in {*images}) == [5, 5, 5]


def test_texts(tmp_path):
    features = {"text": tfds.features.Text(), "label": np.int64}
    make_builder(
        "stories", tmp_path, features, lambda i: {"text": f"story {i}", "label": 1}
    )
    texts = data.load_texts("tfds:stories", "train[:10]", data_dir=str(tmp_path))
    assert len(set(texts)) == 10
    assert all(text.startswith("story ") for text in texts)
