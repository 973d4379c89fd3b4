"""Writes the TFRecord files of a split, and their `dataset.json`."""

import contextlib
import errno
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.checks import check_integer, check_path
from keras_moe.data._captions import checked_captions, encoded
from keras_moe.data._json_schema import read_json
from keras_moe.data._tfrecord import (
    CAPTION_FILE,
    CAPTIONS,
    IMAGE,
    LABEL,
    LABEL_FILE,
    SIDECAR,
    TOKENS,
)
from keras_moe.data.labels import LabelHierarchy
from keras_moe.files import new_file, write_failed, write_json

# Magic bytes of JPEG, PNG, GIF, BMP and WebP.
_IMAGE_FILE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|BM|RIFF....WEBP", re.DOTALL)


def write_tfrecords(
    folder: str | os.PathLike,
    split: str,
    examples: Iterable[tuple[Any, Any]],
    classes: Sequence[str] | int,
    parents: Mapping[str, Sequence[str]] | None = None,
    num_files: int = 1,
) -> None:
    """Writes images and labels as TFRecord files for `load("tfrecord:FOLDER", ...)`.

    Existing files are replaced only after all new ones are written. Call it once per
    split, with the same classes.

    Args:
        folder: path of the folder; created if missing.
        split: name of the split; files are named `split-00000-of-00002.tfrecord` etc.
        examples: iterable of (image, label) or (image, labels): encoded bytes of a JPEG
            or PNG file, or uint8 (height, width, 1 or 3); a class number each, or a
            list of them each.
        classes: names of the classes, or their number.
        parents: dict from a class to its parents; see `LabelHierarchy`.
        num_files: number of files, filled in turn.

    Example:

    ```python
    write_tfrecords("photos", "train", [(jpeg_bytes, [0, 2])], ["a", "b", "c"])
    batches = load("tfrecord:photos", "train", multi_label=True)
    ```
    """
    folder = Path(folder)
    settings: dict[str, Any] = {
        "features": {"image": IMAGE, "label": LABEL},
        "first_label": 0,
    }
    settings["classes"] = classes if isinstance(classes, int) else list(classes)
    count = classes if isinstance(classes, int) else len(classes)
    if parents is not None:
        settings["parents"] = LabelHierarchy(classes, parents).to_dict()["parents"]
    sidecar = folder / SIDECAR
    before = read_json(sidecar, LABEL_FILE) if sidecar.exists() else {}
    for name in ("classes", "parents"):
        if before and before.get(name) != settings.get(name):
            raise ValueError(
                f"Expected the {name} of {folder / SIDECAR}; "
                f"received: {name}={settings.get(name)!r:.100}"
            )

    def write(parts):
        counts, most = _write_labelled(parts, examples, count)
        if before and ("max_labels" in before) != (most is not None):
            raise ValueError(
                f"Expected lists of labels in all splits of {folder / SIDECAR} or in "
                f"none; received: split={split!r} {'with' if most else 'without'}"
            )
        if most is not None:
            settings["max_labels"] = max(most, before.get("max_labels", 1))
        return counts, settings

    _write_split(folder, split, num_files, before.get("counts", {}), write)


def _write_labelled(parts, examples, num_classes) -> tuple[list[int], int | None]:
    """Returns the numbers of examples, and `max_labels` (None for single labels)."""
    most, is_list = 1, None

    def records():
        nonlocal most, is_list
        for number, (image, labels) in enumerate(examples):
            one = isinstance(labels, (int, np.integer))
            try:
                values = [int(labels)] if one else list(map(operator.index, labels))
            except TypeError:  # No integers, or no list of integers.
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
                IMAGE: [_encoded_image(image, number)],
                LABEL: values,
            }

    counts = _write_records(parts, records())
    return counts, most if is_list else None


def write_pair_tfrecords(
    folder: str | os.PathLike,
    split: str,
    pairs: Iterable[tuple[Any, Any]],
    num_files: int = 1,
    tokenizer: Callable[[Any], dict] | None = None,
) -> None:
    """Writes images and captions as TFRecord files for `load_pairs`.

    Existing files are replaced only after all new ones are written. Call it once per
    split.

    Args:
        folder: path of the folder; created if missing.
        split: name of the split; files are named `split-00000-of-00002.tfrecord` etc.
        pairs: iterable of (image, caption) or (image, captions): encoded bytes of a
            JPEG or PNG file, or uint8 (height, width, 1 or 3); one or more strings.
        num_files: number of files, filled in turn.
        tokenizer: function from a list of strings to `"token_ids"` and
            `"padding_mask"`, arrays (captions, tokens), to store instead of the
            captions; `load_pairs` then needs no tokenizer. None stores text.

    Example:

    ```python
    write_pair_tfrecords("photos", "train", [(jpeg_bytes, ["a cat", "a pet"])])
    batches = load_pairs("tfrecord:photos", "train", tokenizer=tokenizer)
    ```
    """
    folder = Path(folder)
    sidecar = folder / SIDECAR
    before = read_json(sidecar, CAPTION_FILE) if sidecar.exists() else {}
    settings: dict[str, Any] = {}

    def records():
        for number, (image, captions) in enumerate(pairs):
            captions, fault = checked_captions(captions)
            if fault is not None:
                raise ValueError(
                    f"Expected captions of each image; received: pair {number} has "
                    f"{fault}"
                )
            texts, about = _stored_texts(captions, tokenizer)
            if about != settings.setdefault("texts", about):
                raise ValueError(
                    f"Expected tokens of one length; received: {about} of pair "
                    f"{number} after {settings['texts']}"
                )
            yield {IMAGE: [_encoded_image(image, number)], **texts}

    def write(parts):
        counts = _write_records(parts, records())
        about = settings["texts"]
        if before and {k: x for k, x in before.items() if k != "counts"} != about:
            raise ValueError(
                f"Expected the features and the length of {sidecar}; received: {about}"
            )
        return counts, about

    _write_split(folder, split, num_files, before.get("counts", {}), write)


def _stored_texts(captions, tokenizer) -> tuple[dict[str, list], dict[str, Any]]:
    """Returns the features of captions, and their entries in `dataset.json`."""
    if tokenizer is None:
        texts = {CAPTIONS: [encoded(caption) for caption in captions]}
        return texts, {"features": {"image": IMAGE, "captions": CAPTIONS}}
    tokens = tokenizer(list(captions))
    rows = {key: np.asarray(tokens[key]) for key in TOKENS}
    shapes = {rows[key].shape for key in TOKENS}
    shape = rows["token_ids"].shape
    if len(shapes) > 1 or len(shape) != 2 or shape[0] != len(captions):
        raise ValueError(
            "Expected a tokenizer with rows of tokens and of their mask for "
            f"{len(captions)} captions; received: shapes {shapes}"
        )
    texts = {TOKENS[key]: rows[key].astype("int64").ravel().tolist() for key in TOKENS}
    return texts, {"features": {"image": IMAGE, **TOKENS}, "max_length": shape[1]}


def _write_split(
    folder: Path,
    split: str,
    num_files: int,
    known: dict[str, int],
    write: Callable[[list[str]], tuple[list[int], dict[str, Any]]],
) -> None:
    """Writes the files of a split and renames them after all are written."""
    if not isinstance(split, str) or not re.fullmatch(r"[A-Za-z0-9]+", split):
        raise ValueError(
            f"Expected a split of letters and digits; received: split={split!r}"
        )
    check_integer("num_files", num_files)
    check_path("folder", folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}-{i:05}-of-{num_files:05}.tfrecord" for i in range(num_files)]
    with contextlib.ExitStack() as files:
        # Globs of the records do not match the names of unfinished files.
        parts = [files.enter_context(new_file(folder / name)).name for name in names]
        try:
            counts, settings = write(parts)
        except OSError as error:
            if error.filename not in parts:
                raise
            path = folder / names[parts.index(error.filename)]
            raise OSError(error.errno, error.strerror, str(path)) from error
        own = re.compile(rf"{split}-\d{{5}}-of-\d{{5}}\.tfrecord")
        old = [
            path
            for path in folder.iterdir()
            if own.fullmatch(path.name) and path.name not in names
        ]
        # New counts are written last, in case the process ends in between: files
        # without a count are counted.
        kept = {n: number for n, number in known.items() if not own.fullmatch(n)}
        write_json(folder / SIDECAR, {**settings, "counts": kept})
    for path in old:
        path.unlink()
    counts = {**kept, **dict(zip(names, counts))}
    write_json(folder / SIDECAR, {**settings, "counts": counts})


def _write_records(parts: list[str], records: Iterable[dict[str, list]]) -> list[int]:
    """Writes records to files in turn, and returns the number in each."""
    import tensorflow as tf

    counts, sizes = [0] * len(parts), [0] * len(parts)
    try:
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(tf.io.TFRecordWriter(part)) for part in parts
            ]
            for number, values in enumerate(records):
                features = {name: _feature(tf, value) for name, value in values.items()}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                content, index = example.SerializeToString(), number % len(parts)
                counts[index] += 1
                sizes[index] += len(content)
                writers[index].write(content)
    except tf.errors.OpError as error:
        part = next((part for part in parts if part in error.message), None)
        if part is None:
            # Applies to records, too: they may come from TensorFlow.
            raise
        reasons = {os.strerror(number): number for number in errno.errorcode}
        reason = error.message.rpartition("; ")[2]
        cause = OSError(reasons.get(reason, errno.EIO), reason)
        raise write_failed(cause, part, sizes[parts.index(part)]) from error
    if not sum(counts):
        raise ValueError("Expected examples to write; received: none")
    return counts


def _encoded_image(image: Any, number: int) -> bytes:
    """Returns encoded bytes as they are, and encodes arrays as PNG."""
    import tensorflow as tf

    if isinstance(image, bytes):
        if not _IMAGE_FILE.match(image):
            raise ValueError(
                "Expected the bytes of an image file; received: "
                f"{len(image)} bytes, {image[:16]!r}, of example {number}"
            )
        return image
    pixels = np.asarray(image)
    if pixels.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ValueError(
            "Expected the bytes of an image file, or uint8 (height, width, 1 or 3); "
            f"received: {type(image).__name__} of shape {pixels.shape} and dtype "
            f"{pixels.dtype}, of example {number}"
        )
    return tf.io.encode_png(pixels).numpy()


def _feature(tf, values):
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
