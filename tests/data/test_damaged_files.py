"""Damaged descriptions: every error is a ValueError or OSError with a name."""

import json

import numpy as np
import pytest

from keras_moe import data
from tests.pipelines import picture, save

tf = pytest.importorskip("tensorflow")

CLASSES = ["animal", "bee", "cat"]
# Values that a program in another language, or a hand, may have left in a JSON file.
VALUES = (
    None, True, 0, -1, 2.5, 2**70, "", "x", "1" * 300, [], [[]],
    ["bee", 1], ["bee", "bee"], {}, {"bee": "animal"}, {"": []}, {"x": None},
)  # fmt: skip
TEXTS = ("", "{", "null", "[]", "3", '{"a": NaN', "\ufeff{}", "[" * 100_000, "1" * 5000)


def failures(path, name, *functions):
    """The share of damaged contents of a file over which functions fail, by name."""
    valid = json.loads(path.read_text())
    texts = [json.dumps({**valid, key: value}) for key in valid for value in VALUES]
    texts += [*TEXTS, json.dumps({**valid, "x": 1})]
    count = 0
    for text in texts:
        path.write_text(text)
        errors = []
        for function in functions:
            try:
                function()
            except (ValueError, OSError) as error:
                errors.append(str(error))
        assert all(str(name) in error for error in errors), text[:200]
        count += bool(errors)
    path.write_text(json.dumps(valid))
    for function in functions:
        function()
    return count / len(texts)


def test_descriptions_of_records(tmp_path):
    path, source = tmp_path / "dataset.json", f"tfrecord:{tmp_path}"
    examples = [(picture(n), [n % 3]) for n in range(6)]
    data.write_tfrecords(tmp_path, "train", examples, CLASSES)
    readers = [lambda: data.num_classes(source)]
    readers.append(lambda: data.num_examples(source, "train"))
    assert failures(path, tmp_path, *readers) > 0.7


def test_exclusions(tmp_path):
    path = tmp_path / "duplicates.json"
    data.write_exclusion(path, "digits", "test", 450, np.array([0, 7, 20]))
    assert data.num_examples("digits", "test", exclude=path) == 447
    share = failures(
        path, path, lambda: data.num_examples("digits", "test", exclude=path)
    )
    assert share > 0.7


@pytest.mark.filterwarnings("ignore:.*are not among its images")
def test_labels_of_folders(tmp_path):
    path = tmp_path / "train" / "labels.json"
    labels = {"0.png": ["bee"], "1.png": ["cat", "animal"], "2.png": ["animal"]}
    for name in labels:
        save(path.parent / name, 0)
    path.write_text(json.dumps(labels))
    source = f"folder:{tmp_path}"
    # Errors about all splits name the folder that they are in.
    assert failures(path, tmp_path, lambda: data.num_examples(source, "train")) > 0.7
