"""Arguments that evaluations refuse, in one table."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe import training
from keras_moe.evaluation import (
    calibration,
    class_embeddings,
    contrastive_accuracy,
    encode_pairs,
    extract_features,
    few_shot,
    mean_average_precision,
    prompts,
    read_class_names,
    read_class_subset,
    read_templates,
    retrieval,
    zero_shot,
)
from tests.refusals import check_refused

CLASSES = np.arange(60) % 3
FEATURES = np.random.default_rng(0).normal(size=(60, 4))
IMAGES = FEATURES.reshape(60, 2, 2, 1)
FOUR = np.ones((4, 3))
LABELLED = {"train_features": FEATURES, "train_labels": CLASSES}
LABELLED |= {"test_features": FEATURES, "test_labels": CLASSES}
EMBEDDED = {"image_embeddings": FOUR, "text_embeddings": FOUR}
TEXTS = {"token_ids": np.ones((4, 3), int), "padding_mask": np.ones((4, 3), bool)}
SUBSET = read_class_subset("imagenet_a")


class Endless:
    def cardinality(self):
        return -1


# Arguments that are right.
RIGHT = {
    few_shot: {**LABELLED, "num_classes": 3, "shots": (1,)},
    extract_features: {"model": np.copy, "data": (IMAGES, CLASSES)},
    calibration: {"probabilities": np.full((60, 3), 1 / 3), "labels": CLASSES},
    retrieval: {**EMBEDDED, "ks": (1,)},
    contrastive_accuracy: {**EMBEDDED, "contrastive_batch_size": 2},
    zero_shot: {"image_embeddings": FOUR, "labels": [0, 1, 2, 3], "classes": FOUR},
    class_embeddings: {},
    prompts: {"class_names": ["cat"], "templates": ["a {}"]},
    read_class_names: {},
    read_templates: {},
    read_class_subset: {},
    SUBSET.indices: {},
    SUBSET.labels: {},
    mean_average_precision: {"labels": np.eye(4, 3, dtype=int), "scores": FOUR},
    encode_pairs: {"model": SimpleNamespace(encode_images=None, encode_text=None)},
    training.ZeroShot: {"data": (), "class_names": ["a", "b"]},
}


@pytest.mark.parametrize(("function", "wrong", "received"), [
    (few_shot, {"train_labels": np.full(60, 3)}, "received: 3, and 60"),
    (few_shot, {"train_labels": CLASSES[1:]}, "shape=(59,)"),
    (few_shot, {"train_features": np.ones(60)}, "shape=(60,)"),
    (few_shot, {"test_features": np.ones((60, 5))}, "shape=(60, 5)"),
    (few_shot, {"train_features": FEATURES * np.nan}, "60 of 60 rows"),
    (few_shot, {"shots": (1, 21)}, "received: 20 of class 0"),
    (few_shot, {"l2s": (0.0, 1.0)}, "l2s=(0.0, 1.0)"),
    (extract_features, {"data": []}, "none"),
    (extract_features, {"data": Endless()}, "for ever"),
    (extract_features, {"batch_size": 0}, "batch_size=0"),
    (extract_features, {"data": (IMAGES, CLASSES[1:])}, "lengths [59, 60]"),
    (few_shot, {"train_features": IMAGES}, "shape=(60, 2, 2, 1)"),
    (calibration, {"probabilities": np.ones((60, 3))}, "60 others, such as row 0"),
    (calibration, {"labels": CLASSES + 1}, "received: 3"),
    (calibration, {"num_bins": 0}, "num_bins=0"),
    (retrieval, {"image_embeddings": np.ones((0, 3))}, "shape=(0, 3)"),
    (retrieval, {"text_embeddings": FOUR[:, 1:]}, "shape=(4, 2)"),
    (retrieval, {"text_embeddings": [[1.0] * 3] * 2 + [[0.0] * 3] * 2}, "[2, 3]"),
    (retrieval, {"text_embeddings": np.ones((5, 3))}, "shape=(4,)"),
    (retrieval, {"image_of_text": [0, 1, 2, 4]}, "received: 4"),
    (retrieval, {"image_of_text": [0, 1, 1, 3]}, "3 of 4 images"),
    (retrieval, {"ks": (1, 5)}, "ks=5"),
    (retrieval, {"text_ids": [0, 1]}, "shape=(2,)"),
    (contrastive_accuracy, {"contrastive_batch_size": 5}, "4 images and 4 texts"),
    (contrastive_accuracy, {"image_ids": [1, 2]}, "shape=(2,)"),
    (zero_shot, {"labels": [0, 1, 2, 4]}, "received: 4"),
    (zero_shot, {"ks": (5,)}, "ks=5"),
    (
        class_embeddings,
        {"prompt_embeddings": [[[1.0], [1.0]], [[1.0], [-1.0]]]},
        "others, first at indices [1]",
    ),
    (prompts, {"class_names": "cat"}, "class_names='cat'"),
    (read_class_names, {"class_names": ["a", " "]}, "['a', ' ']"),
    (read_class_names, {"class_names": ["a", "b", "a"]}, "'a' for"),
    (read_templates, {"templates": ["a photo"]}, "'a photo'"),
    (read_class_subset, {"name": "imagenet_v2"}, "'imagenet_v2'"),
    (SUBSET.indices, {"class_names": ["cat"], "num_classes": 1}, "['cat']"),
    (SUBSET.indices, {"num_classes": 10}, "10 classes"),
    (SUBSET.labels, {"labels": [6, 7]}, "an image of class 7"),
    (mean_average_precision, {"labels": np.full((4, 3), -1)}, "received: -1, "),
    (
        mean_average_precision,
        {"labels": [[0], [1], [2], [3]], "sparse_labels": True},
        "received: 3",
    ),
    (mean_average_precision, {"scores": FOUR[1:]}, "(3, 3)"),
    (
        mean_average_precision,
        {"sample_weight": [1, np.nan, -1, np.inf]},
        "weights [nan -1. inf]",
    ),
    (mean_average_precision, {"labels": np.zeros((4, 3), int)}, "none that count"),
    (encode_pairs, {"pairs": []}, "none"),
    (encode_pairs, {"pairs": ({"images": IMAGES, **TEXTS}, None)}, "60"),
    (
        encode_pairs,
        {"pairs": ({"images": FOUR, **TEXTS}, {"image_ids": [1, 2]})},
        "'image_ids': (2,)",
    ),
    (training.ZeroShot, {"class_names": "nowhere.txt"}, "'nowhere.txt'"),
])  # fmt: skip
def test_refused(function, wrong, received):
    check_refused(function, {**RIGHT[function], **wrong}, re.escape(received))
