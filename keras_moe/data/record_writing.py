"""Writes the TFRecord files of a split, and their `dataset.json`."""

import contextlib
import functools
import operator
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe._checks import check_integer, unfit
from keras_moe._files import new_file, write_json
from keras_moe.data._captions import checked_captions
from keras_moe.data._packages import tf
from keras_moe.data._tfrecord import FEATURES, SIDECAR, read_settings

_LABELLED = {name: FEATURES[name] for name in ("image", "label")}
_CAPTIONED = {name: FEATURES[name] for name in ("image", "captions")}
# Magic bytes of JPEG, PNG, GIF, BMP and WebP.
_IMAGE_FILE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|BM|RIFF....WEBP", re.DOTALL)


def write_tfrecords(
    folder: str | os.PathLike,
    split: str,
    examples: Iterable[tuple[Any, Any]],
    classes: Sequence[str] | int | None = None,
    *,
    num_files: int = 1,
) -> None:
    """Writes images with labels or captions as TFRecord files.

    Call it once per split, with the same classes. `load("tfrecord:FOLDER", ...)` reads
    labels, `load_pairs` captions. Existing files are replaced only after all new ones
    are written.

    Args:
        folder: path of the folder; created if missing.
        split: name of the split; files are named `split-00000-of-00002.tfrecord` etc.
        examples: iterable of images, bytes of a JPEG or PNG file or uint8 (height,
            width, 1 or 3), each with its label or list of labels, class numbers; or
            without `classes` with its caption or list of captions.
        classes: names of the classes, or their number; None for captions.
        num_files: number of files, filled in turn.

    Example:

    ```python
    write_tfrecords("photos", "train", [(jpeg_bytes, [0, 2])], ["a", "b", "c"])
    batches = load("tfrecord:photos", "train", multi_label=True)
    write_tfrecords("pairs", "train", [(jpeg_bytes, ["a cat", "a pet"])])
    batches = load_pairs("tfrecord:pairs", "train", tokenizer=tokenizer)
    ```
    """
    folder = Path(folder)
    before = read_settings(folder)
    if classes is None:
        settings: dict = {"features": _CAPTIONED}
        texts = _captions
    else:
        names = classes if isinstance(classes, int) else list(classes)
        settings = {"features": _LABELLED, "first_label": 0, "classes": names}
        if "max_labels" in before:
            settings["max_labels"] = before["max_labels"]
        texts = functools.partial(_labels, folder, settings, not before)

    def records():
        for number, (image, text) in enumerate(examples):
            values = texts(text, number)
            yield {FEATURES["image"]: [_encoded_image(image, number)], **values}

    _write_split(folder, split, num_files, records(), settings, before)


def _captions(captions: Any, number: int) -> dict[str, list]:
    captions, fault = checked_captions(captions)
    if fault is not None:
        raise unfit("captions of each image", f"example {number} has {fault}")
    return {FEATURES["captions"]: [caption.encode() for caption in captions]}


def _labels(
    folder: Path, settings: dict, is_new: bool, labels: Any, number: int
) -> dict[str, list]:
    """The feature of labels, whose largest number is kept in `settings`."""
    classes = settings["classes"]
    count = classes if isinstance(classes, int) else len(classes)
    if is_new and not number and not isinstance(labels, (int, np.integer)):
        settings["max_labels"] = 1
    is_list = "max_labels" in settings
    try:
        several: Any = labels if is_list else [labels]
        values = [*map(operator.index, several)]
    except TypeError:  # A list among numbers, or a number among lists.
        values = [-1]
    if not all(0 <= x < count for x in values):
        expected = f"labels of {count} classes, all of {folder} numbers or lists"
        raise unfit(expected, f"{labels!r} of example {number}")
    if is_list:
        settings["max_labels"] = max(settings["max_labels"], len(values))
    return {FEATURES["label"]: values}


def _write_split(
    folder: Path,
    split: str,
    num_files: int,
    records: Iterable[dict[str, list]],
    settings: dict,
    before: dict,
) -> None:
    """Writes the files of a split and renames them after all are written."""
    if before:
        # A description by hand may leave out the usual names.
        names = _LABELLED if "classes" in before else _CAPTIONED
        before = {**before, "features": {**names, **before.get("features", {})}}
    for name in ("classes", "features"):
        if before and before.get(name) != settings.get(name):
            expected = f"the {name} of {folder / SIDECAR}"
            raise unfit(expected, f"{name}={settings.get(name)!r:.100}")
    if not re.fullmatch(r"[A-Za-z0-9]+", split):
        raise unfit("a split of letters and digits", split=split)
    check_integer("num_files", num_files)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}-{i:05}-of-{num_files:05}.tfrecord" for i in range(num_files)]
    with contextlib.ExitStack() as files:
        # Globs of the records do not match the names of unfinished files.
        parts = [files.enter_context(new_file(folder / name)).name for name in names]
        counts = _write_records(parts, records)
        own = re.compile(rf"{split}-\d{{5}}-of-\d{{5}}\.tfrecord")
        old = [
            path
            for path in folder.iterdir()
            if own.fullmatch(path.name) and path.name not in names
        ]
        # New counts are written last, in case the process ends in between: files
        # without a count are counted.
        known = before.get("counts", {})
        kept = {n: number for n, number in known.items() if not own.fullmatch(n)}
        write_json(folder / SIDECAR, {**settings, "counts": kept})
    for path in old:
        path.unlink()
    counts = {**kept, **dict(zip(names, counts))}
    write_json(folder / SIDECAR, {**settings, "counts": counts})


def _write_records(parts: list[str], records: Iterable[dict[str, list]]) -> list[int]:
    counts = [0] * len(parts)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(tf.io.TFRecordWriter(part)) for part in parts]
        for number, values in enumerate(records):
            features = {name: _feature(value) for name, value in values.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writers[number % len(parts)].write(example.SerializeToString())
            counts[number % len(parts)] += 1
    if not sum(counts):
        raise ValueError("Expected examples to write; received: none")
    return counts


def _encoded_image(image: Any, number: int) -> bytes:
    """Returns encoded bytes as they are, and encodes arrays as PNG."""
    if isinstance(image, bytes) and _IMAGE_FILE.match(image):
        return image
    pixels = np.asarray(image)
    if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ValueError(
            "Expected the bytes of an image file, or uint8 (height, width, 1 or 3); "
            f"received: {image!r:.40} of shape {pixels.shape} and dtype "
            f"{pixels.dtype}, of example {number}"
        )
    return tf.io.encode_png(pixels).numpy()


def _feature(values):
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
