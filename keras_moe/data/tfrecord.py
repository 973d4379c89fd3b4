"""Images and labels in TFRecord files of `tf.train.Example`.

A file `dataset.json` beside them has what the records do not:

    {
      "classes": ["cat", "dog"],               names, or a number of classes
      "features": {"image": "image/encoded", "label": "image/class/label"},
      "first_label": 0,                        the number of the first class
      "max_labels": 3,                         for several labels per example
      "counts": {"train-00000-of-00001.tfrecord": 1000},
      "parents": {"cat": ["animal"]}           see `LabelHierarchy`
    }

Only "classes" is needed. Without "counts" the records are counted.
"""

import operator
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.examples import RecordExamples, RecordFile
from keras_moe.data.json_schema import (
    DictOf,
    Either,
    Integer,
    ListOf,
    Record,
    Text,
    read_json,
)
from keras_moe.data.label_hierarchy import PARENTS, LabelHierarchy
from keras_moe.data.labels import Classes
from keras_moe.data.matching import is_of_split, matching_files
from keras_moe.data.reading import check_or_name, decode_image, read_or_name
from keras_moe.data.record_writing import (
    SIDECAR,
    encoded_image,
    write_records,
    write_split,
)

FEATURES = {"image": "image/encoded", "label": "image/class/label"}
_FILE = Record(
    {
        # More classes are too many for a head or a one-hot vector.
        "classes": Either(Integer(1, 2**24), ListOf(Text(), minimum=1, unique=True)),
        "features": Record({"image": Text(), "label": Text()}),
        "first_label": Integer(-(2**31)),
        "max_labels": Integer(1, 2**16),
        "counts": DictOf(Integer(0, 2**40)),
        "parents": PARENTS,
    },
    required=("classes",),
)


def read_examples(pattern: str, split: str) -> RecordExamples:
    """The examples of a split; images stay encoded until `decode`."""
    import tensorflow as tf

    settings, classes = _settings(pattern)
    files = split_files(pattern, split, settings.get("counts", {}))
    names = {**FEATURES, **settings.get("features", {})}
    check_first(
        files[0].path,
        {names["image"]: "bytes_list", names["label"]: "int64_list"},
    )
    first_label = settings.get("first_label", 0)

    several = classes.max_labels is not None
    label_spec = tf.io.VarLenFeature if several else partial(tf.io.FixedLenFeature, [])

    features = {
        names["image"]: tf.io.FixedLenFeature([], "string"),
        names["label"]: label_spec("int64"),
    }
    expected = f"a tf.train.Example with {names['image']!r} and {names['label']!r}"

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        labels = example[names["label"]]
        return example[names["image"]], labels.values if several else labels

    def read(record, place):
        image, labels = read_or_name(parse, record, expected, place)
        labels = labels - first_label
        within = tf.reduce_all((labels >= 0) & (labels < classes.count))
        check = check_or_name(
            within, f"labels of {classes.count} classes", place, labels
        )
        with tf.control_dependencies([check]):
            return image, tf.cast(labels, "int32")

    return RecordExamples(files, read, decode_image, classes, encoded_channels=3)


def split_files(pattern: str, split: str, counts: dict[str, int]) -> list[RecordFile]:
    """The files of a split, with their numbers of records."""
    paths = record_paths(pattern)
    # Names are such as "train-00000-of-00008.tfrecord" or "photos-train.tfrecord".
    chosen = [p for p in paths if is_of_split(p, split)]
    if not chosen:
        raise ValueError(
            f"Expected files of tfrecord:{pattern} with the split as a word of their "
            f"names; received: split={split!r}, {[p.name for p in paths[:3]]}"
        )
    # The counts do not hold for files of the same name in other folders.
    known = {paths[0].parent / name: count for name, count in counts.items()}
    files = [
        RecordFile(str(p), 0, known[p] if p in known else count_records(p))
        for p in chosen
    ]
    files = [file for file in files if file.take]
    if not files:
        raise ValueError(
            f"Expected examples in tfrecord:{pattern}; "
            f"received: split={split!r} without any"
        )
    return files


def count_classes(pattern: str) -> int:
    """Number of classes, from the file beside the records."""
    record_paths(pattern)
    return _settings(pattern)[1].count


def class_names(pattern: str) -> tuple[str, ...] | None:
    """The names of the classes, if the file beside the records has them."""
    record_paths(pattern)
    return _settings(pattern)[1].names


def count_records(path: Path) -> int:
    """Counts a file's records by their lengths, without reading them."""
    return len(record_offsets(path))


def record_offsets(path: Path) -> list[int]:
    """The places in a file at which its records begin."""
    size, at, offsets = path.stat().st_size, 0, []
    with path.open("rb") as file:
        while at < size:
            offsets.append(at)
            header = file.read(12)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size
            # A record has its length, a checksum, its bytes, and a checksum.
            at += 16 + length
            if at > size:
                raise ValueError(
                    f"Expected whole records; received: {path}, whose record "
                    f"{len(offsets) - 1} goes on after the end of the file"
                )
            file.seek(at)
    return offsets


def corrupt_files(pattern: str) -> list[str]:
    """The files that cannot be read to their end."""
    import tensorflow as tf

    corrupt = []
    for path in map(str, record_paths(pattern)):
        try:
            for _ in tf.data.TFRecordDataset(path):
                pass
        except tf.errors.OpError:
            corrupt.append(path)
    return corrupt


def write_tfrecords(
    folder: str | os.PathLike,
    split: str,
    examples: Iterable[tuple[Any, Any]],
    classes: Sequence[str] | int,
    parents: Mapping[str, Sequence[str]] | None = None,
    num_files: int = 1,
) -> None:
    """Writes images and labels as TFRecord files, which `"tfrecord:FOLDER"` reads.

    The files take their places when all are written; a write that fails leaves the
    older ones. Splits are written one by one, with the same classes.

    Args:
        folder: path of the folder, which need not exist.
        split: name of the split; the files are `split-00000-of-00002.tfrecord` and so
            on.
        examples: iterable of (image, label) or (image, labels): encoded bytes of a JPEG
            or PNG file, or uint8 (height, width, 1 or 3); the number of a class, or a
            list of such. Either every example has a list, or none.
        classes: names of the classes, or their number.
        parents: dict from a class to those above it; see `LabelHierarchy`.
        num_files: number of files, to which examples are dealt out in turn.

    Raises:
        ValueError: if an argument is out of range, an image is neither, or the classes
            are not those of the splits that are there.
        OSError: with the path and the bytes, if a file cannot be written.

    Example:

    ```python
    write_tfrecords("photos", "train", [(jpeg_bytes, [0, 2])], ["a", "b", "c"])
    batches = load("tfrecord:photos", "train", multi_label=True)
    ```
    """
    folder = Path(folder)
    settings: dict[str, Any] = {"features": FEATURES, "first_label": 0}
    settings["classes"] = classes if isinstance(classes, int) else list(classes)
    count = classes if isinstance(classes, int) else len(classes)
    if parents is not None:
        settings["parents"] = LabelHierarchy(classes, parents).to_dict()["parents"]
    sidecar = folder / SIDECAR
    before = read_json(sidecar, _FILE) if sidecar.exists() else {}
    for name in ("classes", "parents"):
        if before and before.get(name) != settings.get(name):
            raise ValueError(
                f"Expected the {name} of {folder / SIDECAR}; "
                f"received: {name}={settings.get(name)!r:.100}"
            )

    def write(parts):
        counts, most = _write(parts, examples, count)
        if before and ("max_labels" in before) != (most is not None):
            raise ValueError(
                f"Expected lists of labels in all splits of {folder / SIDECAR} or in "
                f"none; received: split={split!r} {'with' if most else 'without'}"
            )
        if most is not None:
            settings["max_labels"] = max(most, before.get("max_labels", 1))
        return counts, settings

    write_split(folder, split, num_files, before.get("counts", {}), write)


def _write(parts, examples, num_classes) -> tuple[list[int], int | None]:
    """Numbers of examples, and the largest one of labels; None for single labels."""
    most, is_list = 1, None

    def records():
        nonlocal most, is_list
        for number, (image, labels) in enumerate(examples):
            one = isinstance(labels, (int, np.integer))
            try:
                values = [int(labels)] if one else list(map(operator.index, labels))
            except TypeError:  # The labels are no integers, or no list of such.
                values = [-1]
            if is_list is None:
                is_list = not one
            if is_list == one or not all(0 <= x < num_classes for x in values):
                raise ValueError(
                    f"Expected labels of {num_classes} classes, all alike numbers or "
                    f"lists; received: {labels!r} of example {number}"
                )
            most = max(most, len(values))
            yield {
                FEATURES["image"]: [encoded_image(image, number)],
                FEATURES["label"]: values,
            }

    counts = write_records(parts, records())
    return counts, most if is_list else None


def record_paths(pattern: str) -> list[Path]:
    """The TFRecord files of a folder or a glob, sorted."""
    paths = matching_files(pattern, "*.tfrecord*")
    paths = [path for path in paths if path.suffix != ".json"]
    if not paths:
        raise ValueError(
            "Expected a folder with TFRecord files, or a glob that matches some; "
            f"received: source='tfrecord:{pattern}'"
        )
    return paths


def sidecar_path(pattern: str) -> Path:
    """The path of the file beside the records, which need not be there."""
    is_folder = os.path.isdir(pattern)
    return (Path(pattern) if is_folder else record_paths(pattern)[0].parent) / SIDECAR


def _settings(pattern: str) -> tuple[dict, Classes]:
    """The content of the file beside the records, and its classes."""
    path = sidecar_path(pattern)
    if not path.is_file():
        raise ValueError(
            f'Expected {SIDECAR} with {{"classes": [names]}} or their number beside '
            f"the TFRecord files; received: source='tfrecord:{pattern}' without"
        )
    settings = read_json(path, _FILE)
    names, most = settings["classes"], settings.get("max_labels")
    if isinstance(names, int):
        return settings, Classes(names, None, most)
    return settings, Classes(len(names), tuple(names), most)


def check_first(path: str, fields: dict[str, str]) -> None:
    """Reads the first record, so that missing features are refused at the door."""
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
