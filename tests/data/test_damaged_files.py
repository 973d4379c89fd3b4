"""Damaged descriptions and data: every error is a ValueError or OSError with a name."""

import copy
import json
import random

import numpy as np
import pytest

from keras_moe.data import (
    LabelHierarchy,
    num_classes,
    num_examples,
    reading_errors,
    write_tfrecords,
)

tf = pytest.importorskip("tensorflow")

CLASSES = ["animal", "bee", "cat"]
PARENTS = {"bee": ["animal"], "cat": ["animal"]}
SHAPE = (2, 2, 1)
# Values that a program in another language, or a hand, may have left in a JSON file.
VALUES = (
    None, True, 0, -1, 2.5, 2**70, "", "x", "1" * 300, [], [[]],
    ["bee", 1], ["bee", "bee"], {}, {"bee": "animal"}, {"": []}, {"x": None},
)  # fmt: skip
TEXTS = ("", "{", "null", "[]", "3", '{"a": NaN', "\ufeff{}", "[" * 100_000, "1" * 5000)


def mutations(value, draw, count):
    """Texts of JSON that is a valid value but for one place or for some bytes."""
    yield from TEXTS
    for place in range(count):
        mutated = copy.deepcopy(value)
        where = mutated
        while True:
            keys = list(where) if isinstance(where, dict) else range(len(where))
            key = draw.choice(list(keys))
            if not (isinstance(where[key], (dict, list)) and where[key]) or (
                draw.random() < 0.4
            ):
                break
            where = where[key]
        if isinstance(where, dict) and draw.random() < 0.3:
            where[draw.choice(["x", "", "count"])] = where.pop(key)
        else:
            where[key] = draw.choice(VALUES)
        text = json.dumps(mutated)
        if place % 4 == 0:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice('{}[]",:0x') + text[at + 1 :]
        yield text


def error_of(function):
    """The ValueError or OSError that a function raises, or None."""
    try:
        with reading_errors():
            function()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def failures(path, name, texts, *functions):
    """How many functions fail over a file with these texts: each with a name."""
    count = 0
    for text in texts:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        errors = [error for error in map(error_of, functions) if error]
        for error in errors:
            assert str(name) in error, text[:200]
        count += bool(errors)
    return count


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    examples = [(np.full((2, 2, 3), n, "uint8"), [n % 3]) for n in range(6)]
    write_tfrecords(folder, "train", examples, CLASSES, PARENTS)
    return folder


def test_descriptions_of_records(records):
    path, source = records / "dataset.json", f"tfrecord:{records}"
    valid = path.read_text()

    functions = (
        lambda: num_examples(source, "train"),
        lambda: num_classes(source),
        lambda: LabelHierarchy.load(path),
    )
    try:
        texts = mutations(json.loads(valid), random.Random(0), 200)
        assert failures(path, records, texts, *functions) > 120
        assert failures(path, records, [valid], *functions) == 0
    finally:
        path.write_text(valid)


@pytest.mark.filterwarnings("ignore:.*are not among its images")
def test_labels_of_folders(tmp_path):
    path = tmp_path / "train" / "labels.json"
    path.parent.mkdir()
    labels = {"0.png": ["bee"], "1.png": ["cat", "animal"], "2.png": ["animal"]}
    for name in labels:
        (path.parent / name).write_bytes(
            tf.io.encode_png(np.zeros(SHAPE, "uint8")).numpy()
        )
    source = f"folder:{tmp_path}"

    def opened():
        num_examples(source, "train")

    # Errors about all splits name the folder that they are in.
    assert failures(path, tmp_path, [json.dumps(labels)], opened) == 0
    texts = mutations(labels, random.Random(3), 150)
    assert failures(path, tmp_path, texts, opened) > 100
