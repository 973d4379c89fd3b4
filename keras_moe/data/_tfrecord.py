"""TFRecord files of `tf.train.Example` with images, and labels or captions.

A file `dataset.json` next to them describes the records. With labels:

    {
      "classes": ["cat", "dog"],               names, or a number of classes
      "features": {"image": "image/encoded", "label": "image/class/label"},
      "first_label": 0,                        the number of the first class
      "max_labels": 3,                         for several labels per example
      "counts": {"train-00000-of-00001.tfrecord": 1000}
    }

Only "classes" is needed. Without "counts" the records are counted. With captions:

    {"features": {"image": "image/encoded", "captions": "image/captions"}}

Records of texts have a feature "text", or the name of `"text"` in "features".
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from keras_moe._checks import unfit
from keras_moe.data import _examples
from keras_moe.data._captions import CaptionOptions, captioned_records
from keras_moe.data._files import files_of_split, matching_files, read_json
from keras_moe.data._packages import tf
from keras_moe.data._texts import record_texts
from keras_moe.data.reading import decode_image, read_or_name

SIDECAR = "dataset.json"
_FILES = "*.tfrecord*"
# Names of features that `dataset.json` may replace.
FEATURES = {
    "image": "image/encoded",
    "label": "image/class/label",
    "captions": "image/captions",
    "text": "text",
}
_SCHEMA = {
    "classes": (int, [str]),
    "features": dict.fromkeys(FEATURES, str),
    "first_label": range(-(2**31), 2**31),
    "max_labels": int,
    "counts": {str: int},
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the content of `dataset.json`, or an empty dict if there is none."""
    path = folder / SIDECAR
    return read_json(path, _SCHEMA, within=folder) if path.exists() else {}


def find_classes(pattern: str, data_dir: str | None = None) -> _examples.Classes:
    return _classes(_settings(pattern), pattern)


def open_labelled(
    pattern: str, split: str, data_dir: str | None
) -> _examples.RecordExamples:
    """Opens a split with labels; images stay encoded until `decode`."""
    settings = _settings(pattern)
    classes = _classes(settings, pattern)
    files = _split_files(pattern, split, settings)
    image, label = (settings["features"][name] for name in ("image", "label"))
    _check_first(files[0].path, {image, label})
    first_label = settings.get("first_label", 0)
    several = classes.max_labels is not None
    label_spec = tf.io.VarLenFeature if several else partial(tf.io.FixedLenFeature, [])
    features = {image: tf.io.FixedLenFeature([], "string"), label: label_spec("int64")}
    expected = f"a tf.train.Example with {image!r} and {label!r}"

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        labels = example[label]
        return example[image], labels.values if several else labels

    def read(record, location):
        stored, labels = read_or_name(parse, record, expected, location)
        labels = labels - first_label
        within = tf.reduce_all((labels >= 0) & (labels < classes.count))
        about = f"Expected labels of {classes.count} classes in"
        check = tf.debugging.Assert(within, [about, location, "; received:", labels])
        with tf.control_dependencies([check]):
            return {"image": stored, "label": tf.cast(labels, "int32")}

    return _examples.RecordExamples(
        files, read, decode_image, classes=classes, encoded_channels=3
    )


def open_captioned(
    pattern: str, split: str, options: CaptionOptions
) -> _examples.Examples | None:
    """Opens a split with captions; None if records have labels."""
    settings = _settings(pattern)
    if "classes" in settings:
        return None
    names = settings["features"]
    image, captions = names["image"], names["captions"]
    # For examples without captions the feature is missing or empty.
    features = {
        image: tf.io.FixedLenFeature([], "string"),
        captions: tf.io.VarLenFeature("string"),
    }

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        return example[image], example[captions].values

    files = _split_files(pattern, split, settings)
    return captioned_records(files, parse, decode_image, 3, options.every_caption)


def open_texts(pattern: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    settings = _settings(pattern)
    files = _split_files(pattern, split, settings)
    name = settings["features"]["text"]
    _check_first(files[0].path, {name})
    features = {name: tf.io.FixedLenFeature([], "string")}
    return record_texts(
        files, lambda record: tf.io.parse_single_example(record, features)[name]
    )


def _settings(pattern: str) -> dict[str, Any]:
    """Returns the content of `dataset.json`, with the names of all features."""
    folder = matching_files(f"tfrecord:{pattern}", _FILES)[0].parent
    settings = read_settings(folder)
    return {**settings, "features": {**FEATURES, **settings.get("features", {})}}


def _classes(settings: dict[str, Any], pattern: str) -> _examples.Classes:
    if "classes" not in settings:
        raise ValueError(
            f'Expected {SIDECAR} with {{"classes": [names]}} or their number next to '
            f"the TFRecord files; received: source='tfrecord:{pattern}' without"
        )
    names, most = settings["classes"], settings.get("max_labels")
    if isinstance(names, int):
        return _examples.Classes(names, None, most)
    if len({*names}) < len(names):
        expected = f"each class once in {SIDECAR}"
        raise unfit(expected, f"source='tfrecord:{pattern}' with {names!r:.100}")
    return _examples.Classes(len(names), tuple(names), most)


def _split_files(
    pattern: str, split: str, settings: dict[str, Any]
) -> list[_examples.RecordFile]:
    """Returns the files of a split with their numbers of records."""
    paths = files_of_split(f"tfrecord:{pattern}", _FILES, split)
    # Counts do not apply to files of the same name in other folders.
    counts = settings.get("counts", {})
    folder = matching_files(f"tfrecord:{pattern}", _FILES)[0].parent
    known = {folder / name: count for name, count in counts.items()}
    files = [
        _examples.RecordFile(
            str(p), 0, known[p] if p in known else len(_examples.record_offsets(p))
        )
        for p in paths
    ]
    files = [file for file in files if file.take]
    if not files:
        raise unfit(f"examples in tfrecord:{pattern}", f"split={split!r} without any")
    return files


def _check_first(path: str, names: set[str]) -> None:
    """Checks that the first record has these features, as several labels need not."""
    from google.protobuf.message import DecodeError

    for record in tf.data.TFRecordDataset(path).take(1).ignore_errors():
        try:
            features = tf.train.Example.FromString(record.numpy()).features.feature
        except DecodeError as error:
            raise unfit(f"records of tf.train.Example in {path}", error) from error
        if not names <= {*features}:
            raise ValueError(
                f"Expected features {sorted(names)} in {path}, or their names under "
                f"'features' in {SIDECAR}; received: {sorted(features)}"
            )
