"""TFRecord files of `tf.train.Example` with images, and labels or captions.

A file `dataset.json` next to them describes the records. With labels:

    {
      "classes": ["cat", "dog"],               names, or a number of classes
      "features": {"image": "image/encoded", "label": "image/class/label"},
      "first_label": 0,                        the number of the first class
      "max_labels": 3,                         for several labels per example
      "counts": {"train-00000-of-00001.tfrecord": 1000},
      "parents": {"cat": ["animal"]}           see `LabelHierarchy`
    }

Only "classes" is needed. Without "counts" the records are counted. With captions:

    {
      "features": {"image": "image/encoded", "captions": "image/captions"},
      "counts": {"train-00000-of-00001.tfrecord": 1000}
    }

Stored tokens are rows of "max_length" integers, one after the other:

    {
      "features": {
        "image": "image/encoded",
        "token_ids": "image/token_ids",
        "padding_mask": "image/padding_mask"
      },
      "max_length": 64
    }
"""

from functools import partial
from pathlib import Path

from keras_moe.data._captions import CaptionOptions, captioned_records
from keras_moe.data._examples import (
    Examples,
    RecordExamples,
    RecordFile,
    record_offsets,
)
from keras_moe.data._files import files_of_split, matching_files
from keras_moe.data._json_schema import (
    DictOf,
    Either,
    Integer,
    ListOf,
    Record,
    Text,
    read_json,
)
from keras_moe.data.labels import PARENTS, Classes
from keras_moe.data.reading import check_or_name, decode_image, read_or_name

SIDECAR = "dataset.json"
_NAMES = "*.tfrecord*"
IMAGE, LABEL, CAPTIONS = "image/encoded", "image/class/label", "image/captions"
TOKENS = {"token_ids": "image/token_ids", "padding_mask": "image/padding_mask"}
_COUNTS = DictOf(Integer(0, 2**40))
LABEL_FILE = Record(
    {
        # Too many classes for a head or a one-hot vector.
        "classes": Either(Integer(1, 2**24), ListOf(Text(), minimum=1, unique=True)),
        "features": Record({"image": Text(), "label": Text()}),
        "first_label": Integer(-(2**31)),
        "max_labels": Integer(1, 2**16),
        "counts": _COUNTS,
        "parents": PARENTS,
    },
    required=("classes",),
)
CAPTION_FILE = Record(
    {
        "features": Record({name: Text() for name in ("image", "captions", *TOKENS)}),
        "max_length": Integer(1, 2**20),
        "counts": _COUNTS,
    }
)


def find_classes(pattern: str, data_dir: str | None = None) -> Classes:
    """Returns the classes from `dataset.json`."""
    return _settings(pattern)[1]


def open_labelled(pattern: str, split: str, data_dir: str | None) -> RecordExamples:
    """Opens a split with labels; images stay encoded until `decode`."""
    import tensorflow as tf

    settings, classes = _settings(pattern)
    files = _split_files(pattern, split, settings.get("counts", {}))
    names = {"image": IMAGE, "label": LABEL, **settings.get("features", {})}
    image, label = names["image"], names["label"]
    _check_first(files[0].path, {image: "bytes_list", label: "int64_list"})
    first_label = settings.get("first_label", 0)
    several = classes.max_labels is not None
    label_spec = tf.io.VarLenFeature if several else partial(tf.io.FixedLenFeature, [])
    features = {
        image: tf.io.FixedLenFeature([], "string"),
        label: label_spec("int64"),
    }
    expected = f"a tf.train.Example with {image!r} and {label!r}"

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        labels = example[label]
        return example[image], labels.values if several else labels

    def read(record, place):
        stored, labels = read_or_name(parse, record, expected, place)
        labels = labels - first_label
        within = tf.reduce_all((labels >= 0) & (labels < classes.count))
        check = check_or_name(
            within, f"labels of {classes.count} classes", place, labels
        )
        with tf.control_dependencies([check]):
            return {"image": stored, "label": tf.cast(labels, "int32")}

    return RecordExamples(
        files, read, decode_image, classes=classes, encoded_channels=3
    )


def open_captioned(
    pattern: str, split: str, options: CaptionOptions
) -> Examples | None:
    """Opens a split with captions or tokens; None if records have labels."""
    import tensorflow as tf

    path = _sidecar_path(pattern)
    settings = {}
    if path.is_file():
        if "classes" in read_json(path, Record({}, others=True)):
            return None
        settings = read_json(path, CAPTION_FILE)
    names = settings.get("features", {})
    image = names.get("image", IMAGE)
    length = settings.get("max_length")
    if length is None:
        fields = {"captions": (names.get("captions", CAPTIONS), "string")}
    else:
        fields = {key: (names.get(key, TOKENS[key]), "int64") for key in TOKENS}
    files = _split_files(pattern, split, settings.get("counts", {}))
    # For examples without captions the feature is missing or empty.
    _check_first(files[0].path, {image: "bytes_list"})
    features = {
        image: tf.io.FixedLenFeature([], "string"),
        **{name: tf.io.VarLenFeature(dtype) for name, dtype in fields.values()},
    }

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        texts = {key: example[name].values for key, (name, _) in fields.items()}
        if length is not None:
            rows = {key: tf.reshape(x, [-1, length]) for key, x in texts.items()}
            texts = {
                "token_ids": tf.cast(rows["token_ids"], "int32"),
                "padding_mask": rows["padding_mask"] > 0,
            }
        return example[image], texts

    return captioned_records(files, parse, decode_image, 3, options.every_caption)


def _split_files(pattern: str, split: str, counts: dict[str, int]) -> list[RecordFile]:
    """Returns the files of a split with their numbers of records."""
    # Counts do not apply to files of the same name in other folders.
    folder = _sidecar_path(pattern).parent
    known = {folder / name: count for name, count in counts.items()}
    files = [
        RecordFile(str(p), 0, known[p] if p in known else len(record_offsets(p)))
        for p in files_of_split(f"tfrecord:{pattern}", _NAMES, split)
    ]
    files = [file for file in files if file.take]
    if not files:
        raise ValueError(
            f"Expected examples in tfrecord:{pattern}; "
            f"received: split={split!r} without any"
        )
    return files


def corrupt_files(pattern: str) -> list[str]:
    """Returns the files that cannot be read to the end."""
    import tensorflow as tf

    corrupt = []
    for path in map(str, _record_paths(pattern)):
        try:
            for _ in tf.data.TFRecordDataset(path):
                pass
        except tf.errors.OpError:
            corrupt.append(path)
    return corrupt


def _record_paths(pattern: str) -> list[Path]:
    """Returns the sorted TFRecord files of a folder or a glob."""
    return matching_files(f"tfrecord:{pattern}", _NAMES)


def _sidecar_path(pattern: str) -> Path:
    """Returns the path of `dataset.json`, which may not exist."""
    return _record_paths(pattern)[0].parent / SIDECAR


def _settings(pattern: str) -> tuple[dict, Classes]:
    """Returns the content of `dataset.json`, and the classes."""
    path = _sidecar_path(pattern)
    if not path.is_file():
        raise ValueError(
            f'Expected {SIDECAR} with {{"classes": [names]}} or their number next to '
            f"the TFRecord files; received: source='tfrecord:{pattern}' without"
        )
    settings = read_json(path, LABEL_FILE)
    names, most = settings["classes"], settings.get("max_labels")
    if isinstance(names, int):
        return settings, Classes(names, None, most)
    return settings, Classes(len(names), tuple(names), most)


def _check_first(path: str, fields: dict[str, str]) -> None:
    """Reads the first record, so that missing features are an early error."""
    import tensorflow as tf

    try:
        record = next(iter(tf.data.TFRecordDataset(path).take(1)), None)
        example = tf.train.Example.FromString(record.numpy())
    except Exception as error:
        raise ValueError(
            f"Expected records of tf.train.Example in {path}; received: {error}"
        ) from error
    features = example.features.feature
    for name, field in fields.items():
        if name not in features or not features[name].HasField(field):
            raise ValueError(
                f"Expected a feature {name!r} ({field}) in {path}, or another "
                f"name under 'features' in {SIDECAR}; received: {sorted(features)}"
            )
