"""TFRecord files of a split, written as a whole beside a file that describes them."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.checks import check_integer, check_path
from keras_moe.files import new_file, write_failed, write_json

SIDECAR = "dataset.json"
# How files of JPEG, PNG, GIF, BMP and WebP begin.
_IMAGE = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|BM|RIFF....WEBP", re.DOTALL)


def write_split(
    folder: Path,
    split: str,
    num_files: int,
    known: dict[str, int],
    write: Callable[[list[str]], tuple[list[int], dict[str, Any]]],
) -> None:
    """Writes the files of a split, which take their places when all are written."""
    if not isinstance(split, str) or not re.fullmatch(r"[A-Za-z0-9]+", split):
        raise ValueError(
            f"Expected a split of letters and digits; received: split={split!r}"
        )
    check_integer("num_files", num_files)
    check_path("folder", folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}-{i:05}-of-{num_files:05}.tfrecord" for i in range(num_files)]
    with contextlib.ExitStack() as files:
        # A glob of the records does not match the files' names until they are whole.
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
        # The new counts are written last, since a process may end in between: files
        # without a count are counted.
        kept = {n: number for n, number in known.items() if not own.fullmatch(n)}
        write_json(folder / SIDECAR, {**settings, "counts": kept})
    for path in old:
        path.unlink()
    counts = {**kept, **dict(zip(names, counts))}
    write_json(folder / SIDECAR, {**settings, "counts": counts})


def write_records(parts: list[str], records: Iterable[dict[str, list]]) -> list[int]:
    """Writes records to files in turn, and returns the numbers of records."""
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
            # Of the records: they may come from TensorFlow, too.
            raise
        reasons = {os.strerror(number): number for number in errno.errorcode}
        reason = error.message.rpartition("; ")[2]
        cause = OSError(reasons.get(reason, errno.EIO), reason)
        raise write_failed(cause, part, sizes[parts.index(part)]) from error
    if not sum(counts):
        raise ValueError("Expected examples to write; received: none")
    return counts


def encoded_image(image: Any, number: int) -> bytes:
    """The bytes of an image file: those that are there, or PNG of an array."""
    import tensorflow as tf

    if isinstance(image, bytes):
        if not _IMAGE.match(image):
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
