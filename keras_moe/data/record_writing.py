"""Writes the TFRecord files of a split, and their `dataset.json`."""

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe._checks import check_integer, unfit
from keras_moe._files import new_file, write_json
from keras_moe.data._captions import checked_captions
from keras_moe.data._packages import tf
from keras_moe.data._tfrecord import FEATURES, SIDECAR, read_settings

# The part of `dataset.json` that describes the records of this module.
_LABELLED = {name: FEATURES[name] for name in ("image", "label")}
_CAPTIONED = {name: FEATURES[name] for name in ("image", "captions")}
_TOKENIZED = {name: FEATURES[name] for name in ("image", "token_ids", "padding_mask")}
# Magic bytes of JPEG, PNG, GIF, BMP and WebP.
_IMAGE_FILE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|BM|RIFF....WEBP", re.DOTALL)


def write_tfrecords(
    folder: str | os.PathLike,
    split: str,
    examples: Iterable[tuple[Any, Any]],
    classes: Sequence[str] | int,
    *,
    num_files: int = 1,
) -> None:
    """Writes images and labels as TFRecord files for `load("tfrecord:FOLDER", ...)`.

    Call it once per split, with the same classes. Existing files are replaced only
    after all new ones are written.

    Args:
        folder: path of the folder; created if missing.
        split: name of the split; files are named `split-00000-of-00002.tfrecord` etc.
        examples: iterable of (image, label or list of labels): bytes of a JPEG or PNG
            file, or uint8 (height, width, 1 or 3); class numbers.
        classes: names of the classes, or their number.
        num_files: number of files, filled in turn.

    Example:

    ```python
    write_tfrecords("photos", "train", [(jpeg_bytes, [0, 2])], ["a", "b", "c"])
    batches = load("tfrecord:photos", "train", multi_label=True)
    ```
    """
    folder = Path(folder)
    count = classes if isinstance(classes, int) else len(classes)
    settings: dict[str, Any] = {
        "features": _LABELLED,
        "first_label": 0,
        "classes": classes if isinstance(classes, int) else list(classes),
    }
    before = read_settings(folder)
    if "max_labels" in before:
        settings["max_labels"] = before["max_labels"]

    def records():
        for number, (image, labels) in enumerate(examples):
            if not before and not number and not isinstance(labels, (int, np.integer)):
                settings["max_labels"] = 1
            is_list = "max_labels" in settings
            try:
                several: Any = labels if is_list else [labels]
                values = [*map(operator.index, several)]
            except TypeError:  # A list among numbers, or a number among lists.
                values = [-1]
            if not all(0 <= x < count for x in values):
                raise ValueError(
                    f"Expected labels of {count} classes, all of {folder} numbers or "
                    f"lists; received: {labels!r} of example {number}"
                )
            if is_list:
                settings["max_labels"] = max(settings["max_labels"], len(values))
            yield {
                FEATURES["image"]: [_encoded_image(image, number)],
                FEATURES["label"]: values,
            }

    _write_split(folder, split, num_files, records(), settings, before)


def write_pair_tfrecords(
    folder: str | os.PathLike,
    split: str,
    pairs: Iterable[tuple[Any, Any]],
    num_files: int = 1,
    tokenizer: Callable[[Any], dict] | None = None,
) -> None:
    """Writes images and captions as TFRecord files for `load_pairs`.

    Call it once per split. Existing files are replaced after all new ones are written.

    Args:
        folder: path of the folder; created if missing.
        split: name of the split; files are named `split-00000-of-00002.tfrecord` etc.
        pairs: iterable of (image, caption or list of captions): bytes of a JPEG or PNG
            file, or uint8 (height, width, 1 or 3); strings.
        num_files: number of files, filled in turn.
        tokenizer: function from a list of strings to `"token_ids"` and
            `"padding_mask"`, (captions, tokens), to store instead of the captions.

    Example:

    ```python
    write_pair_tfrecords("photos", "train", [(jpeg_bytes, ["a cat", "a pet"])])
    batches = load_pairs("tfrecord:photos", "train", tokenizer=tokenizer)
    ```
    """
    folder = Path(folder)
    settings: dict[str, object] = {"features": _CAPTIONED}
    before = read_settings(folder)
    if tokenizer is not None:
        settings["features"] = _TOKENIZED
        if "max_length" in before:
            settings["max_length"] = before["max_length"]

    def records():
        for number, (image, captions) in enumerate(pairs):
            captions, fault = checked_captions(captions)
            if fault is not None:
                raise unfit("captions of each image", f"pair {number} has {fault}")
            texts = {FEATURES["captions"]: [caption.encode() for caption in captions]}
            if tokenizer is not None:
                tokens = tokenizer(list(captions))
                names = ("token_ids", "padding_mask")
                rows = {key: np.asarray(tokens[key], "int64") for key in names}
                texts = {FEATURES[key]: x.ravel().tolist() for key, x in rows.items()}
                length = settings.setdefault("max_length", rows["token_ids"].shape[-1])
                if {x.shape for x in rows.values()} != {(len(captions), length)}:
                    raise ValueError(
                        f"Expected {length} tokens and a mask of them for each "
                        f"caption; received: {[x.shape for x in rows.values()]} of "
                        f"pair {number} with {len(captions)} captions"
                    )
            yield {FEATURES["image"]: [_encoded_image(image, number)], **texts}

    _write_split(folder, split, num_files, records(), settings, before)


def _write_split(
    folder: Path,
    split: str,
    num_files: int,
    records: Iterable[dict[str, list]],
    settings: dict[str, Any],
    before: dict[str, Any],
) -> None:
    """Writes the files of a split and renames them after all are written."""
    if before:
        # A description by hand may leave out the usual names.
        names = _TOKENIZED if "max_length" in before else _CAPTIONED
        names = _LABELLED if "classes" in before else names
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
    """Writes records to files in turn, and returns the number in each."""
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
