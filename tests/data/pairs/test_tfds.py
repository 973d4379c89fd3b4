"""Captions in data sets that are written in the format of TensorFlow Datasets."""

import numpy as np
import pytest

from keras_moe.data import load_captions, load_pairs, num_pairs
from tests.data.test_tfds import make_builder

tfds = pytest.importorskip("tensorflow_datasets")
tf = pytest.importorskip("tensorflow")

coco_captions = pytest.importorskip(
    "tensorflow_datasets.object_detection.coco_captions"
)

pytestmark = pytest.mark.backend_free

IMAGE = {"shape": (None, None, 3), "encoding_format": "jpeg"}
SPLITS = {"train": 6, "test": 5}


def captions_of(index, count):
    return [f"{index % 1000} {letter}" for letter in "abcdefg"[:count]]


def pixels(index):
    # The grey level is the number of the image, also after JPEG.
    return np.full((4, 6, 3), index % 1000, "uint8")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds_pairs")
    box = tfds.features.BBox(0.0, 0.0, 0.5, 0.5)
    thing = {"id": 1, "area": 4, "bbox": box, "label": 3, "is_crowd": False}

    def coco_example(index):
        texts = captions_of(index, 5 + index % 3)
        return {
            "image": pixels(index),
            "image/filename": f"COCO_{index}.jpg",
            "image/id": index,
            "objects": [thing] * (index % 2),
            "captions": [{"text": x, "id": i} for i, x in enumerate(texts)],
        }

    class FewImages(coco_captions.CocoCaptions, skip_registration=True):
        """The features and the folder of the real data set, without its download."""

        name = "coco_captions"
        __module__ = "notebook"

        def _split_generators(self, dl_manager):
            return {
                split: ((i, coco_example(i)) for i in range(count))
                for split, count in SPLITS.items()
            }

        def _generate_examples(self):
            raise NotImplementedError

    config = tfds.download.DownloadConfig(try_download_gcs=False)
    FewImages(data_dir=str(folder)).download_and_prepare(download_config=config)
    flickr = {
        "image": tfds.features.Image(**IMAGE),
        "captions": tfds.features.Sequence(tfds.features.Text()),
        "filename": tfds.features.Text(),
    }

    def flickr_example(index):
        return {
            "image": pixels(index),
            "captions": captions_of(index, 5),
            "filename": f"{index}.jpg",
        }

    one = {"image": tfds.features.Image(**IMAGE), "caption": tfds.features.Text()}
    for name, features, encode in (
        ("flickr30k", flickr, flickr_example),
        ("laion", one, lambda i: {"image": pixels(i), "caption": f"{i % 1000} a"}),
    ):
        make_builder(name, folder, features, encode, None, SPLITS)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "count"),
    [("coco_captions", 5 + 6 + 7 + 5 + 6), ("flickr30k", 25)],
)
def test_captions_of_images(data_dir, pair_tools, name, count):
    source, shape = f"tfds:{name}", (4, 6, 3)
    options = {"data_dir": data_dir}
    (batch,) = pair_tools.rows(load_pairs(source, "test", shape, **options))
    # The writer shuffles: each image is among them with its own captions.
    assert sorted(row[0] for row in batch) == list(range(5))
    assert all(int(row[1].split()[0]) == row[0] for row in batch)
    options["captions"] = "all"
    (every,) = pair_tools.rows(load_pairs(source, "test", shape, **options))
    assert len({row[:2] for row in every}) == len(every) == count
    assert all(int(row[1].split()[0]) == row[0] for row in every)
    assert len({row[2] for row in every}) == 5
    assert num_pairs(source, "test", **options) == count
    captions = load_captions(source, "test", **options)
    assert captions == tuple(row[1] for row in every)


def test_order_goes_on_where_it_was(data_dir, pair_tools):
    def batches(take, **options):
        options = {"data_dir": data_dir, "repeat": True, "seed": 3, **options}
        dataset = load_pairs("tfds:coco_captions", "train", (4, 6, 3), 4, **options)
        return pair_tools.rows(dataset, take)

    whole = batches(3)
    assert batches(1, start_batch=2) == whole[2:]
    # One caption alone is a text of its own.
    captions = load_captions("tfds:laion", "test", data_dir=data_dir)
    assert sorted(captions) == [f"{i} a" for i in range(5)]
    # A slice of the split has other records.
    assert num_pairs("tfds:flickr30k", "train[2:5]", data_dir=data_dir) == 3
    every = {"captions": "all", "data_dir": data_dir}
    assert num_pairs("tfds:flickr30k", "train[2:5]", **every) == 15
    dataset = load_pairs("tfds:flickr30k", "train[2:5]", (4, 6, 3), **every)
    images = [row[0] for row in pair_tools.rows(dataset)[0]]
    assert sorted(images.count(image) for image in {*images}) == [5, 5, 5]
    with pytest.raises(ValueError, match=r"split of tfds:flickr30k.*'nowhere'"):
        load_pairs("tfds:flickr30k", "nowhere", data_dir=data_dir)
